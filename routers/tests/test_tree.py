"""The prefix tree against a list of everything that was sent, and what its readers rely on."""

from hypothesis import given, settings
from hypothesis import strategies as st

from routers.tree import PrefixTree, token_text

TEXT = st.text("ab", max_size=6)
TENANT = st.sampled_from(["r0", "r1", "r2"])


def common(one, other):
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    return shared


def nodes(tree):
    stack = list(tree.root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def check(tree):
    """Owners shrink with depth, sizes add up, and nothing is kept that nobody owns."""
    sizes = dict.fromkeys(tree.tenants(), 0)
    for node in nodes(tree):
        assert node.text
        assert node.owners
        assert node.creator in node.owners
        assert node.parent.children[node.text[0]] is node
        assert set(node.owners) <= set(node.parent.owners)
        for tenant in node.owners:
            sizes[tenant] += len(node.text)
    assert sizes == {tenant: tree.chars(tenant) for tenant in tree.tenants()}


HISTORY = st.lists(st.one_of(st.tuples(TENANT, TEXT), TENANT), max_size=25)


@settings(deadline=None, max_examples=150)
@given(HISTORY, TEXT, st.booleans())
def test_a_match_equals_comparing_with_every_text_that_was_sent(history, probe, whole_path):
    tree, sent = PrefixTree(), []
    for stamp, event in enumerate(history):
        if isinstance(event, str):
            tree.remove_tenant(event)
            sent = [pair for pair in sent if pair[0] != event]
        else:
            tree.insert(event[1], event[0], stamp, whole_path=whole_path)
            sent.append(event)
    check(tree)
    each = {}
    for tenant, text in sent:
        each[tenant] = max(each.get(tenant, 0), common(text, probe))
    found = tree.match_each(probe)
    assert found == {tenant: depth for tenant, depth in each.items() if depth}
    assert tree.match(probe)[1] == max(each.values(), default=0)
    owners, matched = tree.match_owned(probe, ["r0", "r1"])
    best = max((each.get(name, 0) for name in ("r0", "r1")), default=0)
    assert matched == best
    if matched:
        assert all(name in owners for name in ("r0", "r1") if each.get(name, 0) == best)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(TENANT, TEXT), max_size=20), st.integers(0, 10), st.sampled_from([None, "r0"]))
def test_leaves_go_until_the_budget_is_met_and_the_tree_stays_whole(history, budget, tenant):
    tree = PrefixTree()
    for stamp, (name, text) in enumerate(history):
        tree.insert(text, name, stamp, whole_path=False)
    others = {name: tree.chars(name) for name in tree.tenants() if name != tenant}
    tree.evict_leaves(budget, tenant)
    check(tree)
    if tenant is None:
        assert tree.total_chars() <= budget
    else:
        assert tree.chars(tenant) <= budget
        assert {name: tree.chars(name) for name in others} == others


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(TENANT, TEXT), max_size=20), st.integers(0, 12))
def test_the_oldest_nodes_go_until_enough_is_gone(history, chars):
    tree = PrefixTree()
    for stamp, (name, text) in enumerate(history):
        tree.insert(text, name, stamp, whole_path=True)
    before = tree.chars("r0")
    assert tree.evict_oldest("r0", chars) >= min(chars, before)
    check(tree)


def test_a_split_inherits_owners_and_creator():
    tree = PrefixTree()
    tree.insert("abcd", "r0", 1, whole_path=False)
    tree.insert("abxy", "r1", 2, whole_path=False)
    node, matched = tree.match("ab")
    assert (node.text, matched, node.creator, node.owners) == ("ab", 2, "r0", {"r0": 1, "r1": 0})


def test_only_the_last_node_is_stamped_or_the_whole_path():
    for whole_path, first in ((False, 0), (True, 2)):
        tree = PrefixTree()
        tree.insert("ab", "r0", 1, whole_path=whole_path)
        tree.insert("abcd", "r1", 2, whole_path=whole_path)
        assert tree.match("ab")[0].owners == {"r0": 1, "r1": first}
        assert tree.match("abcd")[0].owners == {"r1": 2}


def test_a_creator_that_is_removed_is_followed_by_an_owner():
    tree = PrefixTree()
    tree.insert("ab", "r0", 1, whole_path=False)
    tree.insert("ab", "r1", 2, whole_path=False)
    tree.remove_tenant("r0")
    assert tree.match("ab")[0].creator == "r1"
    tree.remove_tenant("r1")
    assert not tree.root.children


def test_the_oldest_leaf_goes_first_and_its_parent_becomes_one():
    tree = PrefixTree()
    tree.insert("abcd", "r0", 1, whole_path=False)
    tree.insert("abxy", "r0", 2, whole_path=False)
    tree.evict_leaves(5, "r0")
    assert tree.match_each("abcd") == {"r0": 2}
    assert tree.match_each("abxy") == {"r0": 4}


def test_a_text_of_tokens_has_one_character_a_token():
    ids = [0, 7, 0xD800, 128_000, 0x10FFFF]
    assert [ord(char) for char in token_text(ids)] == ids
    assert token_text([]) == ""


def test_a_chain_of_two_thousand_turns_is_no_trouble():
    tree, text = PrefixTree(), ""
    for stamp in range(2_000):
        text += chr(33 + stamp % 90)
        tree.insert(text, "r0", stamp, whole_path=False)
    assert tree.chars("r0") == 2_000
    assert tree.evict_leaves(10, "r0") == 1_990
