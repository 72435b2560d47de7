"""Other programs that use the node: requests and results."""

import msgspec

from kvnet_node.operations.requests.base import Request, Result


class ConnectRequest(Request, frozen=True):
    """Say what another program needs to know of this node's HTTP endpoint.

    Attributes:
        model: ``MODEL`` or ``MODEL#NAME`` to use; None for the node's own choice.
    """

    model: str | None = None


class ConnectModel(msgspec.Struct, frozen=True):
    """A model of ``/v1/models``; ``window_tokens`` is None when its config does not say."""

    id: str
    window_tokens: int | None = None


class ConnectResult(Result, frozen=True, tag="connect"):
    """What another program needs to know. The token is in no result: whoever asks reads the settings for it.

    Attributes:
        url: of the endpoint, without a path.
        running: it answers now; otherwise once the node is started.
        wants_token: requests need the token.
        model: the one to use.
        models: all there are.
    """

    url: str
    running: bool
    wants_token: bool
    model: ConnectModel
    models: list[ConnectModel]
