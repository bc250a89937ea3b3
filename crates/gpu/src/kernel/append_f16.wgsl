    for (var i = thread; i < args.words; i += 64u) {
        let second = select(0.0, x[source + 2u * i + 1u], 2u * i + 1u < args.width);
        cache[vector * args.words + i] = pack2x16float(vec2<f32>(x[source + 2u * i], second));
    }
