"""Send an audio file piece by piece, as a microphone would, and report when there is speech.

Usage: python examples/voice_activity/listen.py FILE.wav [HOST:PORT]

The file has one channel, 16 bits and 16 kHz. HOST:PORT is the gRPC endpoint.
"""

import queue
import sys
import uuid
import wave
from collections.abc import Iterable, Iterator

import numpy as np
import tritonclient.grpc as grpcclient
from numpy.typing import NDArray

SAMPLE_RATE = 16_000
PIECE = 512


def pieces(samples: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Return the audio in pieces of 32 ms; the last one is filled up with silence."""
    padded = np.pad(samples, (0, -len(samples) % PIECE))
    return list(padded.reshape(-1, PIECE))


def speech(address: str, audio: Iterable[NDArray[np.float32]], stream_id: str | int = "") -> Iterator[float]:
    """Yield the probability of speech in each piece of a stream."""
    stream_id = stream_id or uuid.uuid4().hex
    answers: queue.Queue[grpcclient.InferResult | Exception] = queue.Queue()
    with grpcclient.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        waiting = list(audio)
        for number, piece in enumerate(waiting):
            given = grpcclient.InferInput("AUDIO", [1, PIECE], "FP32")
            given.set_data_from_numpy(piece.reshape(1, PIECE))
            client.async_stream_infer(
                "voice_activity",
                [given],
                sequence_id=stream_id,
                sequence_start=number == 0,
                sequence_end=number == len(waiting) - 1,
            )
            answer = answers.get(timeout=60)
            if isinstance(answer, Exception):
                raise answer
            yield float(answer.as_numpy("SPEECH")[0, 0])


def main() -> None:
    with wave.open(sys.argv[1]) as file:
        if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, SAMPLE_RATE):
            sys.exit(f"{sys.argv[1]} must have one channel, 16 bits and {SAMPLE_RATE} Hz")
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
    address = sys.argv[2] if len(sys.argv) > 2 else "localhost:8001"
    speaks = False
    for number, probability in enumerate(speech(address, pieces(samples))):
        if (probability >= 0.5) != speaks:
            speaks = not speaks
            print(f"{number * PIECE / SAMPLE_RATE:7.2f} s  {'speech' if speaks else 'silence'} ({probability:.2f})")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main()
