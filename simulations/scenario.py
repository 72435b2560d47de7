"""What a scenario file may say: a frozen table for each of its parts, with the bounds of every value.

A scenario says who is there (`machines`), what joins them (`network`), which model they run, what is asked of them
(`workload`), and what goes wrong (`churn`, `faults`).
"""

from typing import Annotated

from msgspec import Meta, Struct

MAX_NODES = 100_000
MAX_REQUESTS = 10_000_000
"""More do not fit into memory."""

Text = Annotated[str, Meta(min_length=1, max_length=200)]
Name = Annotated[str, Meta(min_length=1, max_length=60)]
Count = Annotated[int, Meta(ge=1, le=MAX_REQUESTS)]
Tokens = Annotated[int, Meta(ge=1, le=4_000_000)]
SomeTokens = Annotated[int, Meta(ge=0, le=4_000_000)]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Rate = Annotated[float, Meta(ge=0, le=1e9)]
Days = Annotated[float, Meta(gt=0, le=3650)]
Daily = Annotated[float, Meta(ge=0, le=10_000)]


class _Table(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a scenario file: every key is known, and none changes afterwards."""


class Measured(_Table, frozen=True, kw_only=True):
    """What `kvnet bench calibrate` measured on such a machine, instead of the tables.

    Attributes:
        prefill: pairs of a position in tokens and the prefill speed there in tokens a second.
        restore_bytes_s: raw K/V bytes restored a second.
        restore_fixed_s: seconds of any restore.
        decode_bytes_s: raw bytes decoded a second, by codec.
        kv_bytes_per_token: raw bytes of the model.
        answer_tokens_s: tokens answered a second.
    """

    prefill: Annotated[tuple[tuple[SomeTokens, Positive], ...], Meta(min_length=1, max_length=1000)]
    restore_bytes_s: Annotated[float, Meta(gt=0, le=1e13)]
    restore_fixed_s: Rate = 0.0
    decode_bytes_s: dict[Name, Annotated[float, Meta(gt=0, le=1e13)]] = {}
    kv_bytes_per_token: Count
    answer_tokens_s: Positive = 20.0


class Machines(_Table, frozen=True, kw_only=True):
    """Some machines that are alike.

    Attributes:
        count: how many.
        chip: its name, as the world's tables of prefill speeds have it.
        link: what joins it to its site, as the world's table of links has it.
        ram_gb: memory in which live K/V state may stay, in GB of 10^9 bytes; what a model leaves free.
        disk_gb: the store's quota in GB.
        ssd_write_gb_a_day: what the node may write of its own accord in a day, in GB; 0 for no limit. The default is
            the node's own, as that of `disk_gb` is.
        site: machines of one site reach each other over their links, others through the sites' uplinks as well.
        laptop: whether it sleeps as `churn` says.
        measured: on the machine itself, instead of what the tables say of the chip and the model.
    """

    count: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 1
    chip: Name
    link: Name
    ram_gb: Rate = 4.0
    disk_gb: Rate = 50.0
    ssd_write_gb_a_day: Rate = 20.0
    site: Name = "home"
    laptop: bool = False
    measured: Measured | None = None


class Network(_Table, frozen=True, kw_only=True):
    """What joins the machines beyond their own links.

    Attributes:
        uplink: the link of a site to the others, as the world's table of links has it.
        sites: into how many sites each `site` is divided, its machines evenly: an organisation of many offices.
    """

    uplink: Name = "wan"
    sites: Annotated[int, Meta(ge=1, le=10_000)] = 1


class Conversation(_Table, frozen=True, kw_only=True):
    """How a conversation grows. Numbers of tokens are drawn from log-normal distributions with these means.

    Attributes:
        turns: mean number of turns, at least 1; geometrically distributed.
        question_tokens: of what is asked, or what a tool gives back, in each turn.
        answer_tokens: of an answer.
        pause_s: mean seconds between an answer's end and the next turn; exponentially distributed.
        spread: of the logarithms of tokens; 0 for always the mean.
        longest_tokens: a conversation that would become longer ends before.
    """

    turns: Annotated[float, Meta(ge=1, le=10_000)] = 4.0
    question_tokens: Tokens = 200
    answer_tokens: Tokens = 300
    pause_s: Positive = 60.0
    spread: Annotated[float, Meta(ge=0, le=4)] = 0.8
    longest_tokens: Tokens = 128_000


class Office(_Table, frozen=True, kw_only=True, tag_field="kind", tag="office"):
    """People ask about documents they share; few documents are asked about most.

    Attributes:
        requests: about how many in all; conversations begin until they have so many.
        days: over how many days.
        system_tokens: of the system prompt before every document.
        documents: how many there are.
        document_tokens: mean tokens of one.
        popularity: exponent of Zipf's law; 0 for all alike.
        working_hours: whether most is asked in working hours, and not evenly over the day.
        conversation: about a document.
    """

    requests: Count = 2000
    days: Days = 5.0
    system_tokens: SomeTokens = 500
    documents: Count = 200
    document_tokens: Tokens = 12_000
    popularity: Annotated[float, Meta(ge=0, le=4)] = 0.9
    working_hours: bool = True
    conversation: Conversation = Conversation()


class Agents(_Table, frozen=True, kw_only=True, tag_field="kind", tag="agents"):
    """Coding agents: tools and a system prompt in common, a project's files, many short turns.

    Attributes:
        requests, days, working_hours: as of an office.
        kinds: of agents, each with its own tools and system prompt; used by Zipf's law.
        head_tokens: of tools and system prompt.
        projects: worked on by everybody, by Zipf's law.
        project_tokens: mean tokens of the files an agent reads first.
        popularity: exponent of both laws.
        conversation: of an agent with its tools.
    """

    requests: Count = 5000
    days: Days = 5.0
    kinds: Count = 3
    head_tokens: Tokens = 17_000
    projects: Count = 40
    project_tokens: Tokens = 20_000
    popularity: Annotated[float, Meta(ge=0, le=4)] = 0.9
    working_hours: bool = True
    conversation: Conversation = Conversation(
        turns=30.0, question_tokens=600, answer_tokens=250, pause_s=10.0, longest_tokens=160_000
    )


class Classroom(_Table, frozen=True, kw_only=True, tag_field="kind", tag="classroom"):
    """Lessons: everybody asks about the same text within a few minutes.

    Attributes:
        lessons: how many, one after the other.
        lesson_s: seconds from one to the next.
        begin_within_s: everybody begins within so many seconds of a lesson's start.
        material_tokens: mean tokens of a lesson's text.
        system_tokens: before it.
        conversation: of each machine in each lesson.
    """

    lessons: Count = 4
    lesson_s: Positive = 3600.0
    begin_within_s: Positive = 120.0
    material_tokens: Tokens = 8000
    system_tokens: SomeTokens = 300
    conversation: Conversation = Conversation(turns=5.0, question_tokens=80, answer_tokens=200, pause_s=180.0)


class Person(_Table, frozen=True, kw_only=True, tag_field="kind", tag="person"):
    """One person with several machines, who goes on at another one with what was begun at the first.

    Attributes:
        requests, days, working_hours: as of an office.
        moves: the share of turns that are asked at another machine than the turn before.
        system_tokens: of the one system prompt.
        projects: what conversations are about, by Zipf's law.
        project_tokens: mean tokens of what is read first.
        popularity: exponent of that law.
        conversation: as it grows.
    """

    requests: Count = 300
    days: Days = 5.0
    moves: Share = 0.15
    system_tokens: SomeTokens = 4000
    projects: Count = 6
    project_tokens: Tokens = 15_000
    popularity: Annotated[float, Meta(ge=0, le=4)] = 0.8
    working_hours: bool = True
    conversation: Conversation = Conversation(turns=12.0, question_tokens=400, answer_tokens=350, pause_s=90.0)


class Codebase(_Table, frozen=True, kw_only=True, tag_field="kind", tag="codebase"):
    """One body of text that everybody asks about and that is edited: an edit changes all that follows it.

    Attributes:
        days: how many.
        codebase_tokens: of the whole text.
        queries_a_day: questions in all, each at one of the machines.
        edits_a_day: each at a random place.
        edit_from: edits are made from this share of the text on: 0 anywhere, 0.5 in the second half.
        edit_tokens: mean tokens that an edit adds or takes away.
        question_tokens, answer_tokens: mean tokens.
        working_hours: as of an office.
    """

    days: Days = 20.0
    codebase_tokens: Tokens = 100_000
    queries_a_day: Positive = 10.0
    edits_a_day: Daily = 5.0
    edit_from: Share = 0.0
    edit_tokens: SomeTokens = 60
    question_tokens: Tokens = 60
    answer_tokens: Tokens = 300
    working_hours: bool = True


class Trace(_Table, frozen=True, kw_only=True, tag_field="kind", tag="trace"):
    """Recorded requests.

    Attributes:
        file: path of the trace; relative to the scenario file, else to the excerpts that come with the simulator.
        moves: the share of turns that go to another machine than the turn before.
        requests: at most so many from its beginning; 0 for all.
        stretch: all times are multiplied by it: 10 for a tenth of the load.
    """

    file: Text
    moves: Share = 0.0
    requests: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    stretch: Positive = 1.0


Workload = Office | Agents | Classroom | Person | Codebase | Trace


class Churn(_Table, frozen=True, kw_only=True):
    """Who comes and goes.

    Attributes:
        late: share of machines that join after the beginning, evenly over the run.
        leave: share of machines that leave for good, evenly over the run.
        crashes_a_day: mean crashes of each machine.
        down_s: mean seconds that a crash lasts.
        sleeps_a_day: how often a laptop is closed in a day, on average, in working hours.
        asleep_s: mean seconds until it is opened again.
        nights: whether laptops sleep outside working hours.
    """

    late: Share = 0.0
    leave: Share = 0.0
    crashes_a_day: Daily = 0.0
    down_s: Positive = 600.0
    sleeps_a_day: Daily = 0.0
    asleep_s: Positive = 1800.0
    nights: bool = False


class Faults(_Table, frozen=True, kw_only=True):
    """What goes wrong beyond churn.

    Attributes:
        liars: share of machines that send something else than they promised.
        partitions_a_day: how often a site is cut off from the others, on average.
        partition_s: mean seconds that it lasts.
    """

    liars: Share = 0.0
    partitions_a_day: Daily = 0.0
    partition_s: Positive = 600.0


class Scenario(_Table, frozen=True, kw_only=True):
    """One scenario.

    Attributes:
        name: short; in results and file names.
        title: one line for people.
        model: which model all run, as the world's table has it.
        machines: groups of them; nodes are numbered through the groups in order.
        workload: what is asked.
        network, churn, faults: see there.
        policies: those that `compare` runs; none for all.
        exact_transfers: whether every chunk goes through the real fetch machine; left out, up to 10,000 requests.
    """

    name: Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9_-]{0,59}$")]
    title: Text
    model: Name
    machines: Annotated[tuple[Machines, ...], Meta(min_length=1, max_length=1000)]
    workload: Workload
    network: Network = Network()
    churn: Churn = Churn()
    faults: Faults = Faults()
    policies: tuple[Name, ...] = ()
    exact_transfers: bool | None = None

    @property
    def n_nodes(self) -> int:
        """All machines."""
        return sum(group.count for group in self.machines)

    def machine(self, node: int) -> Machines:
        """The group of a node.

        Raises:
            IndexError: there is no such node.
        """
        for group in self.machines:
            if node < group.count:
                return group
            node -= group.count
        raise IndexError(node)
