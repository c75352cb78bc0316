"""Write a WAV file in which a synthetic voice says vowels, with silence before and after.

Usage: python examples/voice_activity/voice.py FILE.wav
"""

import sys
import wave

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 16_000
VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410))
"""Hz of the first three formants. Source: Peterson and Barney (1952), table II, men."""


def voice(seconds: float, pitch: float = 120.0) -> NDArray[np.float32]:
    """Return vowels of 180 ms each: harmonics of a pitch that goes up and down, shaped by formants."""
    time = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    phase = 2 * np.pi * np.cumsum(pitch * (1 + 0.15 * np.sin(2 * np.pi * 2.1 * time))) / SAMPLE_RATE
    source = sum(np.sin(harmonic * phase) / harmonic for harmonic in range(1, 40))
    spoken = np.zeros_like(time)
    length = int(0.18 * SAMPLE_RATE)
    for number, begin in enumerate(range(0, len(time), length)):
        part = np.asarray(source)[begin : begin + length]
        hz = np.fft.rfftfreq(len(part), 1 / SAMPLE_RATE)
        formants = sum(1 / (1 + ((hz - formant) / 80) ** 2) for formant in VOWELS[number % len(VOWELS)])
        spoken[begin : begin + length] = (
            np.fft.irfft(np.fft.rfft(part) * formants, len(part)) * np.hanning(len(part)) ** 0.5
        )
    return np.asarray(0.5 * spoken / np.abs(spoken).max(), np.float32)


def recording(pitch: float = 120.0, seed: int = 0) -> NDArray[np.float32]:
    """Return a second of silence, two of a voice, one of silence, with a little noise."""
    silence = np.zeros(SAMPLE_RATE, np.float32)
    samples = np.concatenate([silence, voice(2.0, pitch), silence])
    noise = 0.002 * np.random.default_rng(seed).standard_normal(len(samples))
    return (samples + noise).astype(np.float32)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with wave.open(sys.argv[1], "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        file.writeframes((recording() * 32767).astype("<i2").tobytes())
