"""An audio file in, uploaded or as base64: LitServe's example for FunASR. Silero VAD finds the speech."""

import io
import wave

import numpy as np
import torch
from silero_vad import get_speech_timestamps, load_silero_vad

import charonia


@charonia.model
class Speech:
    def __init__(self):
        self.detector = load_silero_vad(onnx=True)

    def __call__(self, file: bytes) -> list[dict[str, float]]:
        with wave.open(io.BytesIO(file)) as recording:
            samples = np.frombuffer(recording.readframes(recording.getnframes()), np.int16) / np.float32(32768)
        return get_speech_timestamps(torch.from_numpy(samples), self.detector, return_seconds=True)
