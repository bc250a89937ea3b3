// First position that a token at `position` attends to: of its chunk, of its window, or of all.
fn first_visible(position: u32) -> u32 {
    if (args.chunk > 0u) { return position - position % args.chunk; }
    return select(0u, max(position + 1u, args.window) - args.window, args.window > 0u);
}
