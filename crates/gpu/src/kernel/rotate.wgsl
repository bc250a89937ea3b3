// Rotates pairs of a head's columns, from `rotate_from` on.
for (var pair = thread; pair < args.pairs; pair += 64u) {
    let turn = rotations[args.rotations + row * args.pairs + pair];
    let a_at = rotate_from + select(pair, 2u * pair, args.interleaved == 1u);
    let b_at = rotate_from + select(pair + args.pairs, 2u * pair + 1u, args.interleaved == 1u);
    let a = head[a_at];
    let b = head[b_at];
    head[a_at] = fma(a, turn.x, -(b * turn.y));
    head[b_at] = fma(b, turn.x, a * turn.y);
}
