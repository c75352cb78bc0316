"""The PyTorch backend.

`backend` completes and loads models; `source` finds the file, `archive` tells its kind without PyTorch, and
`torchscript`, `exported`, `aoti` and `eager` each read one kind into a `program.Program`. `naming` says which input is
which argument, `signature` finds out what a model takes, `instance` runs batches, `devices` moves arrays, and `openmp`
keeps the threads of an operator quick. The package is imported when the first model needs it: importing PyTorch takes a
second and 150 MB.

What is decided here:

1. Each instance has its own copy of the weights, as in Triton, unless ENABLE_WEIGHT_SHARING says otherwise.
2. Threads follow the server's budget: one over operators, the instance's share of the cores within one.
3. Inputs are copied, since models may change them; outputs are views unless the model keeps them.
4. What a file may do when it is read is decided before: pickles that are more than tensors need a parameter.
"""

from charonia.server.backends.pytorch.openmp import awake_while_waiting

with awake_while_waiting():
    import torch  # noqa: F401 # read by its OpenMP library when that is loaded
