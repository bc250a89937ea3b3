    if (reason == 0u) {
        var torn = false;
        for (var i = start; i < args.count; i += stride) {
            let words = inbox[args.slot + i];
            torn = torn || any(words == vec4<u32>(ABSENT));
            $TAKE
        }
        if (torn) { poison(TORN); }
    }
