"""The ONNX Runtime backend.

`backend` completes configurations, opens sessions and runs batches, `options` reads the configuration of sessions and
chooses execution providers. The package is imported when the first model needs it, since importing ONNX Runtime takes
time and memory.

Decisions, each with figures in docs/threads.md and docs/onnx_models.md:

1. All CPU instances of a model share one session, so another instance costs no second copy of the weights; its thread
   pool is as large as the instances' shares of the cores together.
2. Threads of the pool spin for 20 us only, and not after a run: longer spinning takes the cores that the server, other
   models and the instance itself need; without spinning, models of many small operators are a third slower.
3. A very fast model runs in one thread: handing work to a pool costs more than it saves.
4. Memory that loading leaves behind is returned to the system immediately.
5. Memory patterns, of which every shape ever seen gets its own, are off for models of variable shape.
"""
