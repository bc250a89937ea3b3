    let head = id.x;
    // The last tile, which has most tokens, comes first.
    let entry = args.tiles + (args.count - 1u - id.y) * 4u;
    let first = tables[entry];
    let source = max(first, args.source);
    let end = min(first + tables[entry + 1u], args.end);
    if (source >= end) { return; }
    let start = tables[entry + 2u];
    let blocks = args.blocks + tables[entry + 3u];
    let seen = start + (source - first) + 1u;
    let visible = select(0u, max(seen, args.window) - args.window, args.window > 0u);
    let last = start + (end - first) - 1u;
    let kv_head = kv_of[head];
