"""The ``kvnet`` command: global flags, the table of verbs, exit codes.

Verbs are named, not imported, so that ``kvnet --help`` and small verbs start fast: this module loads neither libp2p
nor MLX nor trio.
"""

import codecs
import os
import re
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvnet.errors import UsageError
from kvnet_node.arguments import GlobalFlags, split_global_flags
from kvnet_node.failures import failure_of
from kvnet_node.output import Output
from kvnet_node.suggesting import Suggestions

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError

# No line is longer than 78 characters: a terminal of 80 columns must not break it again.
_EPILOGUE = """\
Global flags, before or after the verb:
  --data-dir DIR   where this node keeps its files
  --json           one object a line, the last is the result
  --quiet, --verbose, --no-color

Exit codes: 0 ok, 1 unexpected, 2 usage or configuration, 10 malformed bytes,
20 integrity, 30 trust, 40 compatibility, 50 store, 60 network, 80 engine,
130 interrupted.
"""

# What people type who know other programs, and what it is called here.
_CALLED_HERE: dict[str, str] = {
    "start": "kvnet node start",
    "serve": "kvnet node start",
    "stop": "kvnet node stop",
    "restart": "kvnet node stop, then kvnet node start",
    "node restart": "kvnet node stop, then kvnet node start",
    "pause": "kvnet node pause",
    "resume": "kvnet node resume",
    "ls": "kvnet list",
    "remove": "kvnet rm NAME",
    "delete": "kvnet rm NAME",
    "rename": "kvnet fetch HASH --name NEW, then kvnet rm OLD; kvnet list shows the hash",
    "get": "kvnet fetch HASH --name NAME",
    "pull": "kvnet fetch HASH --name NAME",
    "run": 'kvnet generate --prompt "…"',
    "chat": 'kvnet generate --prompt "…"; kvnet connect CLIENT for chat windows',
    "models": "kvnet model list",
    "pair": "kvnet invite --device",
    "logs": "node.log in the data directory, which kvnet status shows",
    "upgrade": "git pull and make install in the checkout, then kvnet node stop and kvnet node start",
    "update": "git pull and make install in the checkout, then kvnet node stop and kvnet node start",
}

# The headings of ``kvnet --help`` in order, and the verbs below each.
_HEADINGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Contexts and answers", ("add", "ask", "generate", "fetch", "list", "show", "rm")),
    ("The node and its clients", ("node", "status", "connect", "explain", "peers")),
    (
        "Sharing and trust",
        ("invite", "join", "leave", "swarm", "share", "publish", "revoke", "namespace", "key", "export", "import"),
    ),
    ("Prompts and what they cost", ("prompt", "audit", "savings", "size", "simulate", "bench")),
    ("The store", ("pin", "unpin", "gc", "verify", "store")),
    ("This machine", ("demo", "doctor", "selftest", "model", "config")),
)

_VERBS: tuple[tuple[str, str, str], ...] = (
    ("add", "generation:add", "Compute the K/V of files as a named context and keep it."),
    ("ask", "generation:ask", "Answer a question over a named context."),
    ("generate", "generation:generate", "Generate from a prompt or a chat, reusing the longest known prefix."),
    ("fetch", "fetch:fetch", "Fetch an artifact from peers."),
    ("list", "artifacts:list_artifacts", "List the artifacts of this node, or with --peers what members hold."),
    ("show", "artifacts:show", "Show everything about one artifact."),
    ("verify", "artifacts:verify", "Re-hash what is held."),
    ("pin", "artifacts:pin", "Keep an artifact whatever the quota says."),
    ("unpin", "artifacts:unpin", "Let an artifact be removed when room is needed."),
    ("rm", "artifacts:remove", "Remove a version of a name, or an artifact and all its names."),
    ("gc", "artifacts:collect_garbage", "Remove what is not pinned until quota and free space are kept."),
    ("export", "containers:export", "Write an artifact to a .kva file."),
    ("import", "containers:import_container", "Take in an artifact from a .kva file."),
    ("invite", "swarms:invite", "Print an invitation for another machine of yours, or a colleague's."),
    ("join", "swarms:join", "Join with an invitation."),
    ("leave", "swarms:leave", "Leave a swarm: its secrets are forgotten here; asks first."),
    ("share", "sharing:share", "Let a swarm find and read an artifact."),
    ("revoke", "revoking:revoke", "Have an artifact or a key used and served no more, everywhere; asks first."),
    ("publish", "sharing:publish", "Let everybody find and read an artifact; asks first."),
    ("status", "node:status", "Show how this node is."),
    ("peers", "node:peers", "List connected peers, and nodes on the local network."),
    ("connect", "connect:connect", "Print how to point another program at this node."),
    (
        "explain",
        "explain:explain",
        "Explain one of the running node's last requests: what was reused, and why not more.",
    ),
    ("size", "size:size", "Work out the K/V size of a model from its config.json."),
    ("simulate", "simulate:simulate", "Estimate what some Macs like this one would save on a trace."),
    ("selftest", "selftest:selftest", "Prove export and restore on this machine."),
    ("doctor", "doctor:doctor", "Check this installation and this data directory."),
    ("savings", "savings:savings", "Show what reuse has spared, per artifact and in all."),
    ("audit", "audit:audit", "Show what local logs sent again, what no cache served, and why."),
    ("demo", "demo:demo", "Show it all with two nodes on this machine."),
)

_GROUPS: tuple[tuple[str, str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "node",
        "Start, stop and watch the node.",
        (
            ("start", "node:start", "Run the node in the foreground."),
            ("stop", "node:stop", "Stop the running node and wait until it is gone."),
            ("status", "node:status", "Show how this node is."),
            ("pause", "guest:pause", "Serve nothing to peers for now; own requests go on."),
            ("resume", "guest:resume", "Serve peers again."),
        ),
    ),
    (
        "store",
        "Care for the store.",
        (
            ("rebuild", "containers:rebuild", "Make the index anew from the packs."),
            ("scrub", "scrubbing:scrub", "Re-hash what is held, and fetch again what went bad."),
        ),
    ),
    (
        "model",
        "Models on this machine.",
        (
            ("list", "models:list_models", "List MLX models and whether their state can be shared."),
            ("import", "models:import_model", "Make an MLX model folder from a GGUF file."),
            ("match", "matching:match", "Show which models your machines have in common, and what differs."),
        ),
    ),
    (
        "key",
        "Publisher keys: your own and those you trust.",
        (
            ("new", "keys:new", "Make a new signing key; the old ones stay yours."),
            ("rotate", "keys:rotate", "Make a new signing key that is believed where the old one was."),
            ("show", "keys:show", "Show the public key that signs what this node adds."),
            ("list", "keys:list_keys", "List own and trusted keys."),
            ("trust", "keys:trust", "Use artifacts signed by this publisher."),
            ("untrust", "keys:untrust", "Stop using artifacts signed by this publisher."),
        ),
    ),
    (
        "swarm",
        "Who shares what with this machine.",
        (
            ("list", "swarms:list_swarms", "List mine and the swarms this machine is in."),
            ("members", "swarms:members", "List the members of a swarm."),
            ("remove", "swarms:remove", "Remove a member from a swarm, or a machine from yours."),
        ),
    ),
    (
        "namespace",
        "Pair nodes: who shares a namespace finds each other's artifacts.",
        (
            ("list", "namespaces:list_namespaces", "List namespaces, without their secrets."),
            ("export", "namespaces:export", "Write the secrets of mine to a new file for your other machine."),
            ("import", "namespaces:import_namespace", "Make the namespace of a file this node's mine."),
        ),
    ),
    (
        "prompt",
        "Look at requests before they are sent.",
        (("check", "prompt:check", "Show what keeps requests from sharing their beginning."),),
    ),
    (
        "bench",
        "Measure this machine, each way beside the others.",
        (
            ("ttft", "bench:ttft", "Measure the time to first token: cold, from disk, from a peer, and mlx-lm alone."),
            ("calibrate", "bench:calibrate", "Measure what fetching is weighed against: prefill, restore, decode."),
        ),
    ),
    ("config", "Settings.", (("show", "config:show", "Show every setting and where it came from."),)),
)


def build_app() -> "App":
    """The command-line application; no verb is imported yet."""
    from cyclopts import App, Group

    import kvnet

    app = App(
        name="kvnet",
        help=(
            "Keep what a model has read (its K/V cache), reuse it, and fetch it from peers instead of computing it "
            "again."
        ),
        help_epilogue=_EPILOGUE,
        help_format="plaintext",
        version=kvnet.__version__,
        default_parameter=_plain_flags(),
        group_commands=Group("Help", sort_key=len(_HEADINGS)),
    )
    headings = _headings()
    for name, target, text in _VERBS:
        app.command(f"kvnet_node.commands.{target}", name=name, help=text, group=headings.get(name))
    for group_name, group_text, verbs in _GROUPS:
        group = App(name=group_name, help=group_text, group=headings.get(group_name), group_commands=Group("Commands"))
        for name, target, text in verbs:
            group.command(f"kvnet_node.commands.{target}", name=name, help=text)
        app.command(group)
    return app


def _headings() -> dict[str, Any]:
    """Under which heading each verb stands."""
    from cyclopts import Group

    found = {}
    for order, (heading, verbs) in enumerate(_HEADINGS):
        group = Group(heading, sort_key=order)
        found.update(dict.fromkeys(verbs, group))
    return found


def _plain_flags() -> Any:
    from cyclopts import Parameter

    return Parameter(negative=())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    output = Output(json="--json" in arguments)
    _let_all_text_out(json=output.json)
    try:
        flags, rest = split_global_flags(arguments)
        output = Output(
            json=flags.json,
            quiet=flags.quiet,
            verbose=flags.verbose,
            color=flags.color and "NO_COLOR" not in os.environ,
            suggestions=_suggestions(flags),
        )
        code = _run(flags, rest, output)
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_is_gone()
    except SystemExit as exit_request:
        return exit_request.code if isinstance(exit_request.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - the last place: every failure ends in a message and an exit code
        return _report(error, output)
    return code


def _suggestions(flags: GlobalFlags) -> Suggestions:
    """Where this command was told its data directory, the commands it suggests are told it too."""
    given = Path(os.path.abspath(flags.data_dir.expanduser())) if flags.data_dir is not None else None
    return Suggestions(given, [*(name for name, _, _ in _VERBS), *(name for name, _, _ in _GROUPS)])


def _let_all_text_out(*, json: bool) -> None:
    """Where the locale is not UTF-8, escape what it has no character for; JSON is UTF-8 in any locale (RFC 8259)."""
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, TextIOWrapper) or codecs.lookup(stream.encoding).name == "utf-8":
            continue
        if json:
            stream.reconfigure(encoding="utf-8")
        else:
            stream.reconfigure(errors="backslashreplace")


def _run(flags: GlobalFlags, rest: list[str], output: Output) -> int:
    from cyclopts import CycloptsError

    from kvnet_node.invocation import Invocation

    app = build_app()
    try:
        command, bound, injected = app.parse_args(
            rest, exit_on_error=False, print_error=False, help_on_error=False, verbose=False
        )
    except CycloptsError as error:
        if typed := _called_otherwise(rest):
            raise UsageError(f"expected a verb, found {typed!r}", hint=_CALLED_HERE[typed]) from error
        raise UsageError(_usage_text(error), hint=_usage_hint(rest)) from error
    extra = {name: Invocation(flags, output) for name in injected}
    code = command(*bound.args, **bound.kwargs, **extra)
    output.close()
    return code if isinstance(code, int) else 0


def _called_otherwise(rest: list[str]) -> str:
    """The words at the head of a command line that have another name here; "" when they are none of these."""
    return next((typed for typed in (" ".join(rest[:2]), *rest[:1]) if typed in _CALLED_HERE), "")


def _usage_hint(rest: list[str]) -> str:
    groups = {name: {verb for verb, _, _ in verbs} for name, _, verbs in _GROUPS}
    first, second = [*rest, "", ""][:2]
    if second in groups.get(first, ()):
        return f"kvnet {first} {second} --help"
    known = first in groups or first in {name for name, _, _ in _VERBS}
    return f"kvnet {first} --help" if known else "kvnet --help"


def _usage_text(error: "CycloptsError") -> str:
    from cyclopts import UnusedCliTokensError

    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        words = " ".join(error.unused_tokens)
        return f"expected no further argument, found {words[:80]!r}"
    text = str(error)
    flag = re.match(r'Unknown command "(-[^"]*)"', text)
    return f"expected a verb before its flags, found {flag[1][:80]!r}" if flag else text


def _report(error: BaseException, output: Output) -> int:
    failure = failure_of(error)
    try:
        output.close()
        if output.verbose and failure.exit_code == 1:
            import traceback

            traceback.print_exception(error)
        output.error(code=failure.code, exit_code=failure.exit_code, message=failure.message, hint=failure.hint)
    except BrokenPipeError:
        _reader_is_gone()
    return failure.exit_code


def _reader_is_gone() -> int:
    # Whoever read our output has had enough (`kvnet list | head`). Python must not try to flush once more at exit.
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
    return 0


if __name__ == "__main__":
    sys.exit(main())
