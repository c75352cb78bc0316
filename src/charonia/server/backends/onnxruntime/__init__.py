"""The ONNX Runtime backend.

`backend` loads models, `options` reads what a configuration says about sessions, `providers` chooses devices, `session`
makes sessions, `instance` runs batches in them. The package is imported when the first model needs it, since importing
ONNX Runtime takes time and memory.

What is decided here, each with figures in docs/threads.md and docs/onnx_models.md:

1. All CPU instances of a model share one session, so another instance costs no second copy of the weights; its pool has
   as many threads as the instances' shares of the cores make together.
2. Threads of the pool spin for 20 us only, and not after a run: longer spinning takes the cores that the server, other
   models and the instance itself need; none at all makes models of many small operators a third slower.
3. A model that takes next to no time runs in one thread: handing work to a pool costs more than it saves.
4. Memory that loading leaves behind is given back to the system at once.
5. Memory patterns, which are kept for every shape ever seen, are off for models of variable shape.
"""
