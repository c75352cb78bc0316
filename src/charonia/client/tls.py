"""The client's TLS context."""

import ssl
import tempfile
from base64 import encodebytes
from pathlib import Path

from charonia.core.errors import invalid
from charonia.wire.transport import TlsOptions

_KEY_LABELS = ("PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY")


def tls_context(options: TlsOptions, *, http2: bool) -> ssl.SSLContext:
    """Return the context that the options describe.

    Raises:
        ServingError: INVALID_ARG for a file that cannot be read or used.
    """
    try:
        context = ssl.create_default_context(cafile=options.ca_file or None)
    except (OSError, ValueError) as error:
        raise invalid(f"TLS: certificates to trust cannot be read from '{options.ca_file}': {error}") from error
    context.check_hostname = options.verify_peer and options.verify_host
    context.verify_mode = ssl.CERT_REQUIRED if options.verify_peer else ssl.CERT_NONE
    context.set_alpn_protocols(["h2"] if http2 else ["http/1.1"])
    if options.certificate_file:
        _load_certificate(context, options)
    elif options.key_file:
        raise invalid(f"TLS: key '{options.key_file}' has no certificate", hint="name its certificate too")
    return context


def _load_certificate(context: ssl.SSLContext, options: TlsOptions) -> None:
    try:
        if not (options.certificate_is_der or options.key_is_der):
            context.load_cert_chain(options.certificate_file, options.key_file or None)
            return
        certificate = Path(options.certificate_file).read_bytes()
        key = Path(options.key_file).read_bytes() if options.key_file else b""
        if options.certificate_is_der:
            certificate = ssl.DER_cert_to_PEM_cert(certificate).encode()
        _load_pem(context, certificate, _pem_keys(key) if options.key_is_der else [key])
    except (OSError, ValueError) as error:
        raise invalid(
            f"TLS: certificate '{options.certificate_file}' with key '{options.key_file}' cannot be used: {error}"
        ) from error


def _pem_keys(key: bytes) -> list[bytes]:
    """Return a DER key as PEM, once with each possible label."""
    body = encodebytes(key).decode()
    return [f"-----BEGIN {label}-----\n{body}-----END {label}-----\n".encode() for label in _KEY_LABELS]


def _load_pem(context: ssl.SSLContext, certificate: bytes, keys: list[bytes]) -> None:
    # The standard library reads certificates and keys from files only.
    for key in keys:
        with tempfile.NamedTemporaryFile() as file:  # readable by its owner only
            file.write(certificate + b"\n" + key)
            file.flush()
            try:
                context.load_cert_chain(file.name)
            except ssl.SSLError:
                if key is keys[-1]:
                    raise
            else:
                return
