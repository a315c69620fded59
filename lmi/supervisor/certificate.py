"""Whether a server can speak TLS with the certificate and the key that its settings name."""

from __future__ import annotations

from lmi.errors import BadConfiguration


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Raise BadConfiguration for files that cannot be read, are no PEM, are no pair or want a password."""
    if certfile is None:
        if keyfile is not None:
            raise BadConfiguration(f"ssl_keyfile={keyfile}: there is no ssl_certfile, which it is the key of")
        return
    import ssl

    for key, file in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        try:
            if file is not None:
                open(file, "rb").close()
        except OSError as error:
            raise BadConfiguration(f"{key}={file} cannot be read: {error.strerror}") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=_refuse)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        named = f"ssl_certfile={certfile}" + (f" and ssl_keyfile={keyfile}" if keyfile else "")
        raise BadConfiguration(f"{named}: not a certificate and its key in PEM ({reason})") from None


def _refuse() -> str:
    raise BadConfiguration("ssl_keyfile: the key has a password; a server needs one without")
