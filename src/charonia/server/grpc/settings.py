"""The methods of the settings that can be changed at run time: tracing and the log."""

from charonia.core.errors import unsupported
from charonia.server.facade import NO_LOG_CONTROL, known_model
from charonia.server.grpc.calls import UnaryCall
from charonia.server.tracing.requests import NO_TRACING
from charonia.wire import log_settings, trace_settings
from charonia.wire.grpc_framing import Buffer


def trace_setting(call: UnaryCall, message: Buffer) -> None:
    """Run a TraceSetting call."""
    service = call.wire.service
    tracing = service.services.tracing
    if tracing is None:
        raise unsupported(NO_TRACING)
    model, change = trace_settings.decode_message(message)
    known_model(service.engine, model)
    tracing.change(model, change)
    call.answer(trace_settings.encode_message(tracing.settings(model)))


def log_setting(call: UnaryCall, message: Buffer) -> None:
    """Run a LogSettings call."""
    control = call.wire.service.services.log
    if control is None:
        raise unsupported(NO_LOG_CONTROL, hint="change the settings of `logging` there")
    control.change(log_settings.decode_message(message, control.options))
    call.answer(log_settings.encode_message(control.options))
