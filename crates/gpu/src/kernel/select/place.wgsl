// Where a cache has the vector number `entry` of a sequence, each of which stands for `every`
// tokens. A vector is in the place of its last token; `blocks` is the sequence's table of blocks.
fn place_of(entry: u32, every: u32, blocks: u32) -> u32 {
    let last = (entry + 1u) * every - 1u;
    return tables[blocks + last / 32u] * max(32u / every, 1u) + last % 32u / every;
}
