    let head = id.x;
    // The last tile, which has most tokens, comes first.
    let entry = args.tiles + (args.count - 1u - id.y / PARTS) * 5u;
    let skipped = id.y % PARTS * ROWS_OF_PART;
    let first = tables[entry] + skipped;
    let source = max(first, args.source);
    let end = min(min(tables[entry] + tables[entry + 1u], first + ROWS_OF_PART), args.end);
    if (source >= end) { return; }
    let start = tables[entry + 2u] + skipped;
    let blocks = args.blocks + tables[entry + 3u];
    let visible = first_visible(start + (source - first));
    let newest = tables[entry + 4u];
    // The last token that a row attends to.
    let last = min(start + (end - first) - 1u + args.after, newest);
    let kv_head = kv_of[head];
