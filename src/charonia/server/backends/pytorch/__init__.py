"""The PyTorch backend.

`backend` completes and loads models; `archive` identifies the kind of a file without PyTorch, and `source` reads it
into a `program.Program` and infers its signature. `naming` maps inputs to arguments, `instance` runs batches, `devices`
moves arrays, and `openmp` keeps OpenMP threads from sleeping too early. The package is imported when the first model
needs it: importing PyTorch takes a second and 150 MB.

Decisions:

1. Each instance has its own copy of the weights, as in Triton, unless ENABLE_WEIGHT_SHARING says otherwise.
2. Threads follow the server's budget: one across operators, the instance's share of the cores within one.
3. Inputs are copied, since models may change them; outputs are views unless the model keeps them.
4. Files are checked before they are read: pickles that hold more than tensors need ALLOW_UNPICKLING.
"""

from charonia.server.backends.pytorch.openmp import spinning_while_waiting

with spinning_while_waiting():
    import torch  # noqa: F401 # its OpenMP library reads the environment when it is loaded
