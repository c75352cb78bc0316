"""Models that call models at the same time: BentoML's inference graph."""

import asyncio

import charonia


@charonia.model
def shout(sentence: str) -> str:
    return sentence.upper()


@charonia.model
def ask(sentence: str) -> str:
    return sentence.rstrip(".!") + "?"


@charonia.model
def score(sentence: str) -> float:
    return sum(letter.isupper() for letter in sentence) / len(sentence)


@charonia.model
async def graph(original_sentence: str = "I have an idea!") -> list[dict]:
    answers = await asyncio.gather(
        *(charonia.call_async(name, sentence=original_sentence) for name in ("shout", "ask"))
    )
    texts = [answer["output"][0].decode() for answer in answers]
    scores = await asyncio.gather(*(charonia.call_async("score", sentence=text) for text in texts))
    return [{"generated": text, "score": found["output"][0]} for text, found in zip(texts, scores, strict=True)]
