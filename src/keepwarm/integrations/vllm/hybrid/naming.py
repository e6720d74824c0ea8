"""Names of a group's blocks. Names of pages are chained over the whole prompt, within the group's own namespace. A
state's name is made from the name of the page at whose end it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from keepwarm.core.blocks import Block, Chain, TokenIds, chain
from keepwarm.core.identity import Namespace, canonical_json, digest
from keepwarm.integrations.vllm.hybrid.groups import Group
from keepwarm.integrations.vllm.hybrid.messages import Part
from keepwarm.integrations.vllm.messages import Prefix
from keepwarm.integrations.vllm.variants import variant_of

STATE_TOKENS = 2  # a state's bytes have the layout of this many tokens: the last ones, compared on load


def group_namespace(namespace: Namespace, group: Group) -> Namespace:
    """Return the namespace of one group's KV within that of a worker's shard."""
    layout = canonical_json({"of": namespace.model.kv_layout, "group": group.described()})
    return Namespace(replace(namespace.model, kv_layout=layout), namespace.arithmetic)


def pages_chain(group: Group, namespace: Namespace, tokens: TokenIds, keys: Mapping[int, bytes], variant: str) -> Chain:
    """Return the blocks of a prompt's whole pages in one group. `keys` are at the beginnings of units, where pages
    begin, too."""
    cuts = range(group.page_size, len(tokens) + 1, group.page_size)
    within = {at: key for at, key in keys.items() if at < len(tokens)}
    return chain(tokens, cuts, variant_of(namespace, variant), within)


def state_id(exact: bytes) -> bytes:
    """Return the name of the state at the end of a page with this exact name."""
    return digest("keepwarm state 1", exact)


def state_block(page: Block, namespace: Namespace) -> Block:
    """Return the block of the state at the end of a page. It continues no other block and is under the page's salts."""
    return page._replace(
        start=0,
        end=STATE_TOKENS,
        tokens=page.tokens[-STATE_TOKENS:],
        exact=state_id(page.exact),
        prefix=digest("keepwarm state prefix 1", page.prefix),
        parent_exact=namespace.exact_root,
        parent_prefix=namespace.prefix_root,
    )


def blocks_of(group: Group, namespace: Namespace, prefix: Prefix, part: Part) -> tuple[Block, ...]:
    """Return the blocks of one group's share of a prefix."""
    pages = pages_chain(group, namespace, prefix.tokens[: part.end], prefix.extra_keys, prefix.variant)
    if group.kind == "state":
        return (state_block(pages[-1], variant_of(namespace, prefix.variant)),)
    return pages[part.start // group.page_size :]
