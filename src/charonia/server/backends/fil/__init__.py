"""The FIL backend: forests of XGBoost, LightGBM and, as treelite's checkpoints, of scikit-learn and others.

`options` reads the parameters, `forest` reads and checks the file; `backend` runs it with a predictor that a short
trial chooses. XGBoost and LightGBM are imported by their first model.

Decisions, with figures in docs/forests.md:

1. treelite reads every file and reports inputs and outputs of the model. The library that wrote the file predicts too,
   and a short trial at load decides which of the two runs a batch of which size.
2. A library computes in the thread that calls it, and large batches are divided among the backend's threads. OpenMP's
   threads spin for milliseconds after each batch, which takes the cores from everything else; and LightGBM has one
   number of threads for the whole process, so that calls with different ones, at the same time, overrun its buffers.
"""
