"""The three likeliest classes of an image: Cog's ResNet. The stand-in knows digits."""

import numpy as np
from PIL.Image import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import charonia


@charonia.model
class Digit:
    def __init__(self):
        self.model = LogisticRegression(max_iter=200).fit(*load_digits(return_X_y=True))

    def __call__(self, image: Image) -> dict[str, float]:
        pixels = np.asarray(image.convert("L").resize((8, 8))).reshape(1, 64) / 16
        chances = self.model.predict_proba(pixels)[0]
        return {str(digit): float(chances[digit]) for digit in np.argsort(-chances)[:3]}
