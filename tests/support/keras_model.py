"""Writes a small Keras model to the given path: a program of its own, since TensorFlow takes seconds to import."""

import sys

import keras

keras.Sequential([keras.layers.Input((4,), name="x"), keras.layers.Dense(3, name="y")]).save(sys.argv[1])
