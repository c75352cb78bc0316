"""The scikit-learn backend: estimators and pipelines.

`files` reads them, `features` says what they take and answer, `backend` completes configurations, loads models and runs
batches. The package is imported when the first model needs it, since importing
scikit-learn takes a second.

An instance computes in the server's process: the parts that take long release the GIL, and an estimator that is quick
holds it for less time than a message to a process of its own would take.
"""
