"""A table in, an answer for each row out: BentoML's fraud detection."""

import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression

import charonia

PAYMENTS = pd.DataFrame({"amount": [10, 20, 15, 900, 950, 800], "night": [0, 0, 1, 1, 1, 0]})
MODEL = LogisticRegression(max_iter=500).fit(PAYMENTS, [0, 0, 0, 1, 1, 1])


@charonia.model
def is_fraud(payments: pd.DataFrame) -> dict[str, list]:
    chances = MODEL.predict_proba(payments[MODEL.feature_names_in_])[:, 1]
    return {"is_fraud": (chances > 0.5).tolist(), "is_fraud_prob": np.round(chances, 3).tolist()}
