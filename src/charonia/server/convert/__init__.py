"""Models in another form: estimators, TensorFlow and PyTorch models as ONNX, checked against the originals.

`convert` is the procedure. A form that is read is an `Original` in `SOURCES`, a form that is written a row in
`TARGETS`; `check` compares answers.
"""
