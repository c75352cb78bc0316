"""The scikit-learn backend: estimators and pipelines.

`trust` says which files may be read, `files` reads them, `features` says what they take and answer, `estimator` infers
signatures, loads models and runs batches. The package is imported when the first file is read, since importing
scikit-learn takes a second.

An instance computes in the server's process: the parts that take long release the GIL, and an estimator that is quick
holds it for less time than a message to a process of its own would take.
"""
