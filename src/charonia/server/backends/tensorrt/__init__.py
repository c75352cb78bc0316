"""The TensorRT backend: plans, through the `tensorrt` package and the driver of the GPU.

`backend` completes configurations, loads models and runs batches with memory, copies and CUDA graphs of the GPU,
`options` reads the configuration, `plan` reads plans and their profiles. The library is imported when the first plan is
loaded.

1. All instances on one GPU share the engine, so another instance costs no second copy of the weights.
2. A batch takes one block of the GPU's memory, for activations, inputs and outputs, from a pool that all instances of
   all models share. TensorRT itself allocates weights and what a context keeps.
3. CUDA graphs hold addresses, so an instance with graphs keeps its block.
"""
