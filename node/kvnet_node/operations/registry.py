"""The table of operations: name -> request type, result type and the function that does it.

Functions are named, not imported, so that a verb which sends its request to the running node loads neither trio's
users nor the library's heavy parts.
"""

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from kvnet.errors import UsageError
from kvnet_node.operations import requests as r
from kvnet_node.operations.context import OperationContext

OperationFunction = Callable[[OperationContext, Any], Awaitable[r.Result]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation.

    Attributes:
        name: as in results and on the control socket.
        request: the type of its request.
        result: the type of its result.
        function: "module:function" under ``kvnet_node.operations``.
        needs_network: a local run opens a short-lived network.
        reads: it only looks, so that it may work on a copy.
        patient: it waits for another process in the data directory however long that takes.
        quick: it only reads what is at hand: a running node that is silent about it for long hangs.
    """

    name: str
    request: type[r.Request]
    result: type[r.Result]
    function: str
    needs_network: bool = False
    reads: bool = False
    patient: bool = False
    quick: bool = False

    def load(self) -> OperationFunction:
        """Import the function."""
        module, _, function = self.function.partition(":")
        loaded: OperationFunction = getattr(importlib.import_module(f"kvnet_node.operations.{module}"), function)
        return loaded


OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation("add", r.AddRequest, r.AddResult, "adding:add"),
        Operation("ask", r.AskRequest, r.AskResult, "generation:ask", needs_network=True),
        Operation("generate", r.GenerateRequest, r.GenerateResult, "generation:generate", needs_network=True),
        Operation("fetch", r.FetchRequest, r.FetchResult, "fetching:fetch", needs_network=True, patient=True),
        Operation("list", r.ListRequest, r.ListResult, "artifacts:list_artifacts", reads=True, quick=True),
        Operation("list peers", r.OfferedRequest, r.OfferedResult, "offered:list_offered", reads=True, quick=True),
        Operation("show", r.ArtifactRequest, r.ShowResult, "artifacts:show", reads=True, quick=True),
        Operation("verify", r.VerifyRequest, r.VerifyResult, "artifacts:verify"),
        Operation("pin", r.ArtifactRequest, r.PinResult, "artifacts:pin"),
        Operation("unpin", r.ArtifactRequest, r.PinResult, "artifacts:unpin"),
        Operation("rm", r.RemoveRequest, r.RemoveResult, "removing:remove"),
        Operation("gc", r.CollectRequest, r.CollectResult, "artifacts:collect_garbage"),
        Operation("export", r.ExportRequest, r.ExportResult, "containers:export"),
        Operation("import", r.ImportRequest, r.ImportResult, "containers:import_container"),
        Operation("store rebuild", r.RebuildRequest, r.RebuildResult, "containers:rebuild"),
        Operation("store scrub", r.ScrubRequest, r.ScrubResult, "scrubbing:scrub", needs_network=True),
        Operation("key new", r.KeyRequest, r.KeyResult, "keys:new"),
        Operation("key show", r.KeyRequest, r.KeyResult, "keys:show", reads=True, quick=True),
        Operation("key rotate", r.KeyRequest, r.RotateResult, "revoking:rotate"),
        Operation("revoke", r.RevokeRequest, r.RevokeResult, "revoking:revoke"),
        Operation("key list", r.KeyRequest, r.KeyListResult, "keys:list_keys", reads=True, quick=True),
        Operation("key trust", r.TrustRequest, r.TrustResult, "keys:trust"),
        Operation("key untrust", r.TrustRequest, r.TrustResult, "keys:untrust"),
        Operation(
            "namespace list",
            r.NamespaceListRequest,
            r.NamespaceListResult,
            "namespaces:list_namespaces",
            reads=True,
            quick=True,
        ),
        Operation("namespace export", r.NamespaceFileRequest, r.NamespaceResult, "namespaces:export"),
        Operation("namespace import", r.NamespaceFileRequest, r.NamespaceResult, "namespaces:import_namespace"),
        Operation("invite", r.InviteRequest, r.InviteResult, "swarms:invite"),
        Operation("join", r.JoinRequest, r.JoinResult, "swarms:join", needs_network=True),
        Operation("leave", r.LeaveRequest, r.LeaveResult, "swarms:leave"),
        Operation("swarm list", r.SwarmRequest, r.SwarmListResult, "swarms:list_swarms", reads=True, quick=True),
        Operation("swarm members", r.SwarmRequest, r.SwarmMembersResult, "swarms:members", reads=True, quick=True),
        Operation("swarm remove", r.SwarmRemoveRequest, r.SwarmRemoveResult, "swarms:remove"),
        Operation("share", r.ShareRequest, r.ShareResult, "sharing:share_with"),
        Operation("prompt check", r.PromptCheckRequest, r.PromptCheckResult, "prompts:check"),
        Operation("explain", r.ExplainRequest, r.ExplainResult, "explain:explain", reads=True),
        Operation("status", r.StatusRequest, r.StatusResult, "node:status", reads=True, quick=True),
        Operation("node stop", r.StopRequest, r.StopResult, "node:stop", quick=True),
        Operation("node pause", r.PauseRequest, r.PauseResult, "guest:pause"),
        Operation("node resume", r.ResumeRequest, r.ResumeResult, "guest:resume"),
        Operation("model match", r.MatchRequest, r.MatchResult, "peers:match", needs_network=True),
        Operation("connect", r.ConnectRequest, r.ConnectResult, "connect:connect"),
        Operation("peers", r.PeersRequest, r.PeersResult, "peers:peers", needs_network=True, quick=True),
        Operation("network check", r.NetworkCheckRequest, r.NetworkCheckResult, "network:check", needs_network=True),
        Operation("savings", r.SavingsRequest, r.SavingsResult, "savings:savings", reads=True, quick=True),
        Operation("bench calibrate", r.CalibrateRequest, r.CalibrateResult, "calibrating:calibrate"),
        Operation("selftest", r.SelftestRequest, r.SelftestResult, "selftest:selftest"),
    )
}


def operation(name: str) -> Operation:
    """The operation of that name.

    Raises:
        UsageError: there is none.
    """
    if (found := OPERATIONS.get(name)) is None:
        raise UsageError(
            f"this node knows no operation {name!r}", hint="is the running node an older kvnet? restart it"
        )
    return found
