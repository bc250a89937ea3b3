//! Sums of weighted values.

use super::{AttendMany, PIECES, THREADS};

impl AttendMany {
    /// Adds the tokens' values. A thread adds those of its part of the tokens, for all heads,
    /// because it converts each value once. Then it adds the sums of all parts for its head.
    pub(super) fn value(self) -> String {
        let (parts, words, per_word, columns) = (self.parts(), self.words(), self.per_word(), self.columns());
        let pieces = PIECES / parts;
        let mut text: String = (0..pieces).map(|p| self.piece(p, pieces)).collect();
        // The values are not needed any more. Behind the sums of values are those of weights, which
        // are the same for all words of a part.
        text += "workgroupBarrier();\n";
        let place = |at: String| format!("pool[({at}) / 4u][({at}) % 4u]");
        let of_weights = self.heads * per_word * THREADS;
        for h in 0..self.heads {
            let [value, weight] =
                ["piece", "share"].map(|name| tree(0..pieces, &|p| format!("{name}{p}_{h}")));
            text += &format!("{{ let value = {value};\n");
            for c in 0..per_word {
                let to = place(format!("{}u + thread", (h * per_word + c) * THREADS));
                text += &format!("{to} = bitcast<u32>(value[{c}u]);\n");
            }
            let to = place(format!("{}u + part_of_thread", of_weights + h * parts));
            text += &format!("if (word == 0u) {{ {to} = bitcast<u32>({weight}); }} }}\n");
        }
        text += "workgroupBarrier();\n";
        for k in 0..self.items().1 {
            let sum = |first: &dyn Fn(usize) -> String| {
                tree(0..parts, &|p| format!("bitcast<f32>({})", place(first(p))))
            };
            let value = |c: usize| {
                sum(&|p| {
                    let of_head = format!("head{k} * {}u + word", per_word * THREADS);
                    format!("{of_head} + {}u", c * THREADS + p * words)
                })
            };
            let values: Vec<_> = (0..per_word).map(value).collect();
            text += &format!(
                "{{ let top = tops[head{k}];
let shrink = exp(most{k} - top);
most{k} = top;
acc{k} = fma(acc{k}, {columns}(shrink), {columns}({}));
total{k} = fma(total{k}, shrink, {}); }}
",
                values.join(", "),
                sum(&|p| format!("head{k} * {parts}u + {}u", of_weights + p))
            );
        }
        text
    }

    /// For each head, the weighted values of piece `p` of a thread, and the sum of their weights.
    fn piece(self, p: usize, pieces: usize) -> String {
        let columns = self.columns();
        let tokens = self.tokens() / PIECES;
        let quads_of_value = self.words() / 4;
        let mut text = String::new();
        text += &self.each(|h| format!("var piece{p}_{h} = {columns}(0.0);\nvar share{p}_{h} = 0.0;\n"));
        text += &format!("{{ let first = part_of_thread * {}u + {}u;\n", pieces * tokens, p * tokens);
        for q in 0..tokens / 4 {
            let quad = format!("first / 4u + {q}u");
            if self.int8 {
                text += &format!("let scale{q} = of_values[{quad}];\n");
            }
            text += &self.each(|h| {
                let weight = format!("weight{q}_{h}");
                format!(
                    "let {weight} = weights[{}u + {quad}];
share{p}_{h} = share{p}_{h} + (({weight}.x + {weight}.y) + ({weight}.z + {weight}.w));
",
                    16 * h
                )
            });
            for (t, c) in ["x", "y", "z", "w"].into_iter().enumerate() {
                let word =
                    format!("pool[(first + {}u) * {quads_of_value}u + word / 4u][word % 4u]", 4 * q + t);
                let value = match self.int8 {
                    true => format!("vec4<f32>(unpack4xI8({word}))"),
                    false => format!("unpack2x16float({word})"),
                };
                text += &format!("{{ let value = {value};\n");
                let scale = if self.int8 { format!(" * scale{q}.{c}") } else { String::new() };
                text += &self.each(|h| {
                    format!("piece{p}_{h} = fma({columns}(weight{q}_{h}.{c}{scale}), value, piece{p}_{h});\n")
                });
                text += "}\n";
            }
        }
        text + "}\n"
    }
}

/// Sums names in a balanced tree. The order does not depend on which thread adds which part.
fn tree(names: std::ops::Range<usize>, name: &dyn Fn(usize) -> String) -> String {
    if names.len() == 1 {
        return name(names.start);
    }
    let middle = names.start + names.len() / 2;
    format!("({} + {})", tree(names.start..middle, name), tree(middle..names.end, name))
}
