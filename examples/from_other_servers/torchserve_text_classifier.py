"""Chances of each class of a text: TorchServe's handler `text_classifier`."""

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import make_pipeline

import charonia

TEXTS = {"the match was won in extra time": "sport", "shares fell after the report": "business"}
MODEL = make_pipeline(CountVectorizer(ngram_range=(1, 2), strip_accents="unicode"), MultinomialNB())
MODEL.fit(list(TEXTS), list(TEXTS.values()))


@charonia.model(max_batch_size=32)
def topic(data: list[str]) -> list[dict[str, float]]:
    return [dict(zip(MODEL.classes_, row.tolist(), strict=True)) for row in MODEL.predict_proba(data)]
