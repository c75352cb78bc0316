"""An application of FastAPI beside a model: BentoML's `mount_asgi_app`.

charonia serve bentoml_fastapi.py --mount app:/app
"""

from fastapi import FastAPI
from pydantic import BaseModel

import charonia

app = FastAPI()


class Features(BaseModel):
    sepal_len: float
    petal_len: float


@charonia.model
def species(features: Features) -> str:
    return "setosa" if features.petal_len < 2.5 else "another"


@app.get("/metadata")
def metadata() -> dict:
    return {"name": "species", "version": 1}


@app.post("/predict")
async def predict(features: Features) -> dict:
    answer = await charonia.call_async("species", **features.model_dump())
    return {"prediction": answer["output"][0].decode()}
