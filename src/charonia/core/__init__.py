"""Values that both towers share: errors, datatypes, tensors, requests and responses."""
