    let head = id.x;
    // The last tile, which has most tokens, comes first.
    let entry = args.tiles + (args.count - 1u - id.y) * 5u;
    let first = tables[entry];
    let source = max(first, args.source);
    let end = min(first + tables[entry + 1u], args.end);
    if (source >= end) { return; }
    let start = tables[entry + 2u];
    let blocks = args.blocks + tables[entry + 3u];
    let visible = first_visible(start + (source - first));
    let newest = tables[entry + 4u];
    // The last token that a row attends to.
    let last = min(start + (end - first) - 1u + args.after, newest);
    let kv_head = kv_of[head];
