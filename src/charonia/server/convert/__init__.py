"""Models as ONNX: estimators, TensorFlow and PyTorch models, checked against the originals.

`convert` is the procedure. A form that is read is an `Original` in `SOURCES`; `check` compares answers.
"""
