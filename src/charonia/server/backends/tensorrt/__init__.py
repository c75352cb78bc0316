"""The TensorRT backend: plans, through the `tensorrt` package and the driver of the GPU.

`backend` completes configurations and loads models, `options` reads the configuration, `plan` reads plans and their
profiles, `gpu` has memory, copies and CUDA graphs, `instance` runs batches. `build` makes a plan from an ONNX model.
The library is imported when the first plan is loaded.

1. All instances on one GPU share the engine, so another instance costs no second copy of the weights.
2. The contexts of an instance, one for each of its profiles, share one block for activations: they never run together.
3. Inputs and outputs have fixed places on the GPU, as large as the profiles allow: CUDA graphs hold addresses.
"""
