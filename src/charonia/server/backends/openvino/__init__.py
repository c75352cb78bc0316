"""The OpenVINO backend.

The package is imported when the first model needs it.

Decisions, with figures in docs/openvino.md:

1. The instances of a model share one compiled model; each has an inference request of its own and computes in its own
   thread, or in place. With as many streams as instances, blocking calls fill them: there is nothing left to gain from
   asynchronous requests.
2. All streams together have the threads that the instances' shares of the cores amount to, and none is pinned to a
   core, where it would meet the pinned thread of the next model.
3. Models compute in f32, as they do elsewhere. OpenVINO's own choice on many processors is bf16.
4. Inputs are not copied, even where they are read-only: OpenVINO does not write to them. Outputs are written to arrays
   of the answer where their shape is known beforehand.
"""
