"""The first tower: the inference server.

A server reports to those who run it only. ONNX Runtime collects usage events, keeps an identifier of the machine in the
user's cache folder and sends both to Microsoft, unless this variable says otherwise before it is imported, here or in a
worker process.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
