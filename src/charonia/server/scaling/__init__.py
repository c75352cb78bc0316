"""Instances by load: more instances of a model while requests wait and the machine has room, fewer when it is idle."""
