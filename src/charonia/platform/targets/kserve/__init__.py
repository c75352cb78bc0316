"""The target `kserve`: deployments as InferenceServices, over what the target `kubernetes` has."""
