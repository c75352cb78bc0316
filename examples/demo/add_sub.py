"""Sum and difference of two tensors, over HTTP and over gRPC."""

import numpy as np
import tritonclient.grpc
import tritonclient.http


def call(client_module, address):
    client = client_module.InferenceServerClient(address)
    inputs = [client_module.InferInput(name, [1, 4], "FP32") for name in ("INPUT0", "INPUT1")]
    inputs[0].set_data_from_numpy(np.array([[1, 2, 3, 4]], np.float32))
    inputs[1].set_data_from_numpy(np.array([[10, 20, 30, 40]], np.float32))
    result = client.infer("add_sub", inputs)
    return result.as_numpy("OUTPUT0"), result.as_numpy("OUTPUT1")


if __name__ == "__main__":
    print("HTTP:", *call(tritonclient.http, "localhost:8000"))
    print("gRPC:", *call(tritonclient.grpc, "localhost:8001"))
