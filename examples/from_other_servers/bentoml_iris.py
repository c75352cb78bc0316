"""A classifier of scikit-learn at a chosen path: BentoML's quickstart."""

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

import charonia


@charonia.model(path="/classify")
class Iris:
    def __init__(self):
        self.model = LogisticRegression(max_iter=500).fit(*load_iris(return_X_y=True))

    def __call__(self, input_series: Annotated[NDArray[np.float64], charonia.Shape(-1, 4)]) -> list[int]:
        return self.model.predict(input_series).tolist()
