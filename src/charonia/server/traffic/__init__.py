"""Traffic between the versions of a model: weights, stickiness, shadow versions, canary plans."""
