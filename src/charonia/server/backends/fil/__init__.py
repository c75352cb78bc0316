"""The FIL backend: forests of XGBoost, LightGBM and, as treelite's checkpoints, of scikit-learn and others.

`options` reads the parameters, `forest` the file, `predictors` run it, `trial` chooses between them, `instance` runs
batches. The package is imported when the first model needs it; XGBoost and LightGBM by the first model of theirs.

Decisions, with figures in docs/forests.md:

1. A process of its own reads a file first (`probe`, `structure`): the libraries crash on damaged ones.
2. treelite reads every file and says what the model takes and gives. The library that wrote the file predicts too, and
   a short trial at load decides which of the two runs a batch of which size.
3. A library computes in the thread that calls it, and large batches are divided among threads of our own. OpenMP's
   threads spin for milliseconds after each batch, which takes the cores from everything else; and LightGBM has one
   number of threads for the whole process, so that calls with different ones, at the same time, overrun its buffers.
"""
