"""Training steps taken ahead of their forwards, as prefetching pipelines on CUDA take them."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from life_cases import ADMISSIONS, EVERY_LIFE, EVICTIONS, living_table, stream_stats
from mock_device import CUDA, MockDevice, run_lookups_backward
from table_cases import ids_of, make_group, make_table, same_state

from torchrec_dyn.initializers import Constant
from torchrec_dyn.optimizers import OptimizerKind

LIMIT = 8
batches = st.lists(st.lists(st.integers(0, 20), max_size=LIMIT), min_size=2, max_size=2)


class Trained:
    """Two tables and their group, trained by batches of one list of ids for each table."""

    def __init__(self, *lives, **options):
        options = {"limit": LIMIT, "unseen": "initial"} | options
        self.tables = [
            living_table(EVICTIONS[eviction], ADMISSIONS[admission], name=f"t{n}", **options)
            for n, (eviction, admission) in enumerate(lives)
        ]
        self.group = make_group(*self.tables)

    def ahead(self, lists):
        return self.group.prefetch_step(*self.batch(lists))

    def forward(self, lists, ahead=None, training=True):
        return self.group(*self.batch(lists), training=training, ahead=ahead)

    def batch(self, lists):
        """Returns ids and offsets: all bags have one id, and the shorter list empty bags."""
        longest = max(map(len, lists))
        lengths = [int(i < len(one)) for one in lists for i in range(longest)]
        ids = ids_of(*(number for of_table in lists for number in of_table))
        place = self.group.device
        return ids.to(place), torch.tensor([0, *lengths]).cumsum(0).to(place)

    def states(self):
        return [table.export_state() for table in self.tables]

    def counts(self):
        return [stream_stats(table) for table in self.tables]


def check_equal(one, other):
    for got, expected in zip(one.states(), other.states(), strict=True):
        assert same_state(got, expected)
    assert one.counts() == other.counts()


def learn(output):
    if output.requires_grad and output.numel():
        (output * torch.arange(output.numel()).view_as(output)).sum().backward()


def fits(trained, lists):
    """Returns True if no batch fails: tables that do not evict may be full."""
    distinct = [len({*of_table}) for of_table in lists]
    pairs = zip(trained.tables, distinct, strict=True)
    return all(t.life.replaces or t.num_rows + n <= t.row_limit for t, n in pairs)


@settings(max_examples=25)
@given(
    lives=st.lists(st.sampled_from(EVERY_LIFE[1:]), min_size=2, max_size=2),
    program=st.lists(st.tuples(batches, st.integers(0, 3)), max_size=12),
)
def test_a_pipeline_that_steps_ahead_trains_as_a_plain_loop(lives, program):
    """The step of a batch is taken before the backward of the batch before; time is set in between."""
    plain, piped = Trained(*lives), Trained(*lives)
    program = [(lists, time) for lists, time in program if any(lists)]
    time, last = 0, None
    for lists, passed in program:
        if not fits(plain, lists):
            break
        time += passed
        for trained in (plain, piped):
            for table in trained.tables:
                table.set_time(time)
        ahead = piped.ahead(lists)
        if last is not None:
            learn(last)
        expected, last = plain.forward(lists), piped.forward(lists, ahead)
        assert torch.equal(last, expected)
        learn(expected)
    if last is not None:
        learn(last)
    check_equal(piped, plain)


LIVES = [("lru", "count"), ("none", "all")]
FIRST, SECOND = [[1, 2, 2, 3], [1, 2]], [[2, 9, 9], [5]]


@pytest.fixture
def pair():
    """Two equal groups after a first batch."""
    made = Trained(*LIVES), Trained(*LIVES)
    for one in made:
        for _ in range(2):
            learn(one.forward(FIRST))
    return made


def test_a_batch_without_a_forward_counts_and_holds_no_rows(pair):
    plain, piped = pair
    ahead = piped.ahead(SECOND)
    assert piped.tables[0].stats()["step"] == 3 and len(piped.tables[0].forwards) == 1
    del ahead
    assert len(piped.tables[0].forwards) == 0
    plain.forward(SECOND)
    gc.collect()
    check_equal(piped, plain)


def test_two_forwards_of_a_batch_are_two_steps(pair):
    plain, piped = pair
    ahead = piped.ahead(SECOND)
    for given_ahead in (ahead, None):
        learn(piped.forward(SECOND, given_ahead))
        learn(plain.forward(SECOND))
    check_equal(piped, plain)


def test_evaluation_between_changes_nothing_and_uses_no_step(pair):
    plain, piped = pair
    ahead = piped.ahead(SECOND)
    with torch.no_grad():
        piped.forward([[1, 77], [1]], training=False)
        read = piped.forward(SECOND, ahead, training=False)
    assert torch.equal(read, piped.forward(SECOND, training=False))
    learn(piped.forward(SECOND, ahead))
    learn(plain.forward(SECOND))
    check_equal(piped, plain)


def test_a_forward_without_gradients_ends_the_step(pair):
    _, piped = pair
    ahead = piped.ahead(SECOND)
    with torch.no_grad():
        piped.forward(SECOND, ahead)
    del ahead
    assert len(piped.tables[0].forwards) == 0


def test_a_save_between_is_of_the_state_after_the_step(pair):
    plain, piped = pair
    ahead = piped.ahead(SECOND)
    saved, expected = piped.states(), plain.forward(SECOND)
    for got, state in zip(saved, plain.states(), strict=True):
        assert same_state(got, state)
    learn(piped.forward(SECOND, ahead))
    learn(expected)
    check_equal(piped, plain)


def test_a_table_frozen_between_is_read_and_not_updated(pair):
    _, piped = pair
    ahead = piped.ahead(SECOND)
    piped.tables[0].is_frozen = True
    before = piped.states()
    output = piped.forward(SECOND, ahead)
    assert output.requires_grad
    learn(output)
    after = piped.states()
    assert same_state(after[0], before[0])
    assert not torch.equal(after[1]["weight"], before[1]["weight"])
    assert after[1]["step"] == before[1]["step"]  # the step was counted when it was taken


@pytest.mark.parametrize("frozen", [[0], [0, 1]])
def test_a_table_unfrozen_between_trains_from_the_next_batch_on(pair, frozen):
    """Also if no other table of the group is trained."""
    plain, piped = pair
    for number in frozen:
        piped.tables[number].is_frozen = True
    ahead, before, counts = piped.ahead(SECOND), piped.states(), piped.counts()
    for number in frozen:
        piped.tables[number].is_frozen = False
    learn(piped.forward(SECOND, ahead))
    for number in frozen:
        assert same_state(piped.states()[number], before[number])
        assert piped.counts()[number] == counts[number]
    for trained, step in ((piped, piped.ahead(SECOND)), (plain, None)):
        learn(trained.forward(SECOND, step))
    for number in frozen:
        assert same_state(piped.states()[number], plain.states()[number])
        assert piped.counts()[number] == plain.counts()[number]


def test_tables_frozen_at_the_step_or_at_the_forward(pair):
    _, piped = pair
    ahead = piped.ahead(SECOND)
    for table in piped.tables:
        table.is_frozen = True
    frozen_ahead, expected = piped.ahead(SECOND), piped.forward(SECOND, training=False)
    # Holds from the batch after, as for a table beside trained ones.
    piped.tables[0].erase(ids_of(2))
    before = piped.states()
    for step in (ahead, frozen_ahead):
        output = piped.forward(SECOND, step)
        assert torch.equal(output, expected) and not output.requires_grad
    assert all(map(same_state, piped.states(), before))
    assert not torch.equal(piped.forward(SECOND, training=False), expected)
    del ahead, frozen_ahead, step
    assert len(piped.tables[0].forwards) == 0


def check_forwards(pair, ahead):
    """Checks that a forward with a step and one without read, learn and leave the same."""
    plain, piped = pair
    outputs = [plain.forward(SECOND), piped.forward(SECOND, ahead)]
    assert torch.equal(*outputs)
    for output in outputs:
        learn(output)
    for got, expected in zip(piped.states(), plain.states(), strict=True):
        assert same_state(got, expected)


def test_loaded_tables_take_the_step_again(pair):
    plain, piped = pair
    states = [{name: part.clone() for name, part in state.items()} for state in plain.states()]
    ahead = piped.ahead(SECOND)
    for trained in pair:
        for table, state in zip(trained.tables, states, strict=True):
            table.load_state(state)
    with torch.no_grad():
        piped.forward(SECOND, ahead, training=False)  # takes no step
    check_forwards(pair, ahead)


def check_one_loaded(pair, loaded, frozen):
    """Loads one table between step and forward, and checks that no table counts a batch twice or never."""
    plain, piped = pair
    for trained in pair:
        trained.tables[loaded].is_frozen = frozen
    state = {name: part.clone() for name, part in plain.states()[loaded].items()}
    ahead = piped.ahead(SECOND)
    counts = piped.counts()
    for trained in pair:
        trained.tables[loaded].load_state(state)
    check_forwards(pair, ahead)
    assert piped.counts()[1 - loaded] == counts[1 - loaded] == plain.counts()[1 - loaded]
    for trained in pair:
        learn(trained.forward(FIRST))
    assert all(map(same_state, piped.states(), plain.states()))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("loaded", [0, 1])
def test_a_loaded_table_alone_takes_its_step_again(pair, loaded, frozen):
    check_one_loaded(pair, loaded, frozen)


def test_a_table_without_a_policy_beside_a_loaded_one_counts_its_batch_once():
    made = Trained(("none", "all"), ("none", "all")), Trained(("none", "all"), ("none", "all"))
    check_one_loaded(made, 1, frozen=False)


def test_a_row_erased_beside_a_loaded_table_is_kept_for_the_forward(pair):
    outputs = []
    for trained, is_loaded in zip(pair, (False, True), strict=True):
        ahead = trained.ahead(SECOND)
        assert trained.tables[0].erase(ids_of(2)) == 1
        if is_loaded:
            trained.tables[1].load_state(trained.tables[1].export_state())
        outputs.append(trained.forward(SECOND, ahead))
        learn(outputs[-1])
        assert trained.tables[0].stats()["late_grads"] == 1
    assert torch.equal(*outputs)


def test_updates_beside_a_loaded_table_are_those_of_their_step():
    """Two steps are taken ahead of a load to an earlier step; Adam corrects by the step."""
    plain, piped = (Trained(*LIVES, kind=OptimizerKind.ADAM) for _ in range(2))
    state = {name: part.clone() for name, part in plain.states()[0].items()}
    for trained in (plain, piped):
        learn(trained.forward(FIRST))
    steps = [piped.ahead(lists) for lists in (SECOND, FIRST)]
    for trained, of_trained in ((plain, [None, None]), (piped, steps)):
        trained.tables[0].load_state(state)
        for lists, ahead in zip((SECOND, FIRST), of_trained, strict=True):
            learn(trained.forward(lists, ahead))
    assert all(map(same_state, piped.states(), plain.states()))


@pytest.mark.parametrize("is_left", [False, True])
def test_initial_rows_of_frozen_tables_after_a_load_of_one(is_left):
    """The id that has no row is of the table that is not loaded, or of the other one."""
    made = [Trained(("none", "all"), ("none", "all")) for _ in range(2)]
    trained, new = made
    for table in trained.tables:
        table.find_or_insert(ids_of(1, 2))
        table.is_frozen = True
    lists = [[9], [1]] if is_left else [[1], [2]]
    ahead = trained.ahead(lists)
    if is_left:
        trained.tables[0].assign(ids_of(9), torch.full((1, 4), 7.0))  # after the step
    trained.tables[1].load_state((trained if is_left else new).tables[1].export_state())
    expected = new.forward(lists, training=False)
    assert expected.any() and torch.equal(trained.forward(lists, ahead), expected)


def test_a_forward_leaves_the_step_of_frozen_tables_as_it_is():
    """Initial rows of unseen ids are shown."""
    one = Trained(*LIVES)
    for table in one.tables:
        table.is_frozen = True
    ahead = one.ahead(FIRST)
    first, second = (one.forward(FIRST, ahead) for _ in range(2))
    assert torch.equal(first, second) and first.ne(0).any()


def test_an_erased_row_is_kept_for_the_forward():
    """Its id gets another row with the next batch; the late gradient changes neither."""
    [life, *_] = LIVES
    piped = Trained(("lru", "all"), life, initializer=Constant(1.0), kind=OptimizerKind.EXACT_SGD)
    table = piped.tables[0]
    ahead = piped.ahead([[1, 2], []])
    assert table.erase(ids_of(1)) == 1
    table.find_or_insert(ids_of(50, 51))  # they must not get the erased row
    assert table.stats()["withheld"] == 1
    output = piped.forward([[1, 2], []], ahead)
    assert output[:, :4].tolist() == [[1.0] * 4] * 2
    learn(output)
    assert table.stats()["late_grads"] == 1
    assert table.lookup(ids_of(50, 51))[0].tolist() == [[1.0] * 4] * 2
    assert not table.lookup(ids_of(1))[1].item()


def test_changes_since_a_moment_between_step_and_forward(pair):
    """The update records its rows, although the step recorded them too: that was before the version."""
    _, piped = pair
    early = [table.version() for table in piped.tables]
    ahead = piped.ahead(SECOND)
    table = piped.tables[0]
    late = table.version()
    learn(piped.forward(SECOND, ahead))
    changed, _ = late.log.changed_rows(late, table.id_map)
    assert sorted(changed.tolist()) == [2, 9]
    del early


def test_another_batch_is_refused(pair):
    _, piped = pair
    text = r"expected the batch that was prefetched, of 4 ids, got 6 ids\. Use one context"
    with pytest.raises(ValueError, match=text):
        piped.forward(FIRST, piped.ahead(SECOND))
    ahead = piped.ahead(SECOND)
    piped.tables[0].load_state(piped.tables[0].export_state())
    before = piped.states()
    with pytest.raises(ValueError, match=text):
        piped.forward(FIRST, ahead)
    assert all(map(same_state, piped.states(), before))


@pytest.fixture
def device():
    with MockDevice() as device:
        yield device


class Stream:
    """A fake of a stream of torch, that notes the waits of all streams."""

    device = CUDA

    def __init__(self, name, waits):
        self.name, self.waits = name, waits

    def wait_event(self, event):
        self.waits.append((self.name, event.stream.name))


class Event:
    def record(self, stream):
        self.stream = stream


def test_on_a_device_only_the_step_waits_for_reads(device, monkeypatch):
    """The forward has no reads, waits for the step's stream, and keeps the memory of the step's rows."""
    waits = []
    prefetching, training = Stream("prefetching", waits), Stream("training", waits)
    current = [training]
    if device.is_mock:  # a GPU runs all on one stream here
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
        monkeypatch.setattr("torch.cuda.current_stream", lambda _: current[-1])
        monkeypatch.setattr("torch.cuda.Event", Event)
    plain, piped = Trained(*LIVES, unseen="zeros"), Trained(*LIVES, unseen="zeros", device=CUDA)
    last, expected = None, None
    for lists in (FIRST, FIRST, SECOND, FIRST, [[4, 5, 6, 7, 8], [3]], FIRST):
        device.forget()
        waits.clear()
        current.append(prefetching)
        ahead = piped.ahead(lists)
        if device.is_mock:
            assert device.reads and waits == [("prefetching", "training")] * (last is not None)
        current.pop()
        waits.clear()
        if last is not None:
            run_lookups_backward({"": Lookup(last)})
            run_lookups_backward({"": Lookup(expected)})
        device.forget()
        last, expected = piped.forward(lists, ahead), plain.forward(lists)
        assert device.reads == device.mixed == device.without_kernel == []
        if device.is_mock:
            assert waits == [("training", "prefetching")]
            kept = [tensor for tensor, stream in device.recorded if stream is training]
            assert any(tensor is ahead.taken.rows for tensor in kept)
        assert torch.equal(last.detach().memory, expected)
    for got, state in zip(piped.states(), plain.states(), strict=True):
        assert same_state({name: part.cpu() for name, part in got.items()}, state)


@pytest.mark.parametrize("frozen", [[], [0], [0, 1]])
def test_on_a_device_only_a_loaded_table_waits_in_the_forward(device, frozen):
    plain, piped = Trained(*LIVES, unseen="zeros"), Trained(*LIVES, unseen="zeros", device=CUDA)
    for trained in (plain, piped):
        trained.forward(FIRST)
        for number in frozen:
            trained.tables[number].is_frozen = True
    state, expected = plain.tables[0].export_state(), None
    for is_loaded in (False, True):
        device.forget()
        ahead = piped.ahead(SECOND)
        assert not device.is_mock or (len(device.reads) == 1 or len(frozen) < 2)
        if is_loaded:
            for trained in (plain, piped):
                trained.tables[0].load_state(state)
        device.forget()
        got, expected = piped.forward(SECOND, ahead), plain.forward(SECOND)
        assert device.mixed == device.without_kernel == []
        assert not device.is_mock or (len(device.reads) > 0) == is_loaded
        assert torch.equal(got.detach().memory, expected)
    for got, expected in zip(piped.states(), plain.states(), strict=True):
        assert same_state({name: part.cpu() for name, part in got.items()}, expected)


def test_prefetched_ids_of_known_counts_wait_once(device):
    """Tables without a life insert when they are prefetched; the counts of the batch are not read again."""
    table = make_table(device=CUDA)
    ids, offsets = ids_of(3, 4).to(CUDA), ids_of(0, 1, 2).to(CUDA)
    for inserted in (True, False):
        device.forget()
        make_group(table).prefetch(ids, offsets)
        assert device.mixed == [] and (len(device.reads) == 1 + inserted or not device.is_mock)
    assert table.num_rows == 2


class Lookup:
    """An output as `run_lookups_backward` takes it."""

    def __init__(self, output):
        self.output = output

    def values(self):
        return self.output
