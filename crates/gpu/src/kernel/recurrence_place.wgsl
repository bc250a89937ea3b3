    // A workgroup has a head of a sequence; a thread a column of its state, and every eighth row.
    let head = id.x;
    let at = args.sequences + id.y * 8u;
    let begin = sequences[at];
    let start = max(begin, args.first);
    let end = min(sequences[at + 1u], args.end);
    let line = thread % 32u;
    let part = thread / 32u;
    let column = id.z * 32u + line;
    let v = min(column, args.value_dim - 1u);
    let key_head = head / args.run % args.key_heads;
    let in_slot = args.state_first + head * args.key_dim * args.value_dim + v;
    let states = sequences[at + args.write_at] * args.slot_numbers + in_slot;
    let read_at = select(args.write_at, args.read_at, start == begin);
    let old_states = sequences[at + read_at] * args.slot_numbers + in_slot;
    let rate = exp(rates[head]);
