"""The target `kserve`: deployments as InferenceServices, built on the target `kubernetes`."""
