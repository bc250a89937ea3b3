//! Sums of weighted values.

use super::{AttendMany, PIECES, THREADS};

impl AttendMany {
    /// Adds the tokens' values.
    pub(super) fn value(self) -> String {
        let ((items, sets), parts) = (self.items(), self.parts());
        let pieces = PIECES / parts;
        let columns = self.columns();
        let mut text = String::new();
        for k in 0..sets {
            text += &format!(
                "let top{k} = tops[head{k}];
let shrink{k} = exp(most{k} - top{k});
most{k} = top{k};
"
            );
        }
        for p in 0..pieces {
            text += &self.piece(p, pieces);
        }
        for k in 0..sets {
            let [value, weight] =
                ["piece", "share"].map(|name| tree(0..pieces, &|p| format!("{name}{p}_{k}")));
            if parts == 1 {
                text += &format!(
                    "acc{k} = fma(acc{k}, {columns}(shrink{k}), {value});
total{k} = fma(total{k}, shrink{k}, {weight});
"
                );
                continue;
            }
            text += &format!("{{ let value = {value};\n");
            for c in 0..self.per_word() {
                text += &format!("shares[{}u + thread] = value[{c}u];\n", c * THREADS);
            }
            text += &format!(
                "shares[{}u + thread] = {weight}; }}\nworkgroupBarrier();\n",
                self.per_word() * THREADS
            );
            let shared =
                |c: usize| tree(0..parts, &|p| format!("shares[{}u + item]", c * THREADS + p * items));
            let all: Vec<_> = (0..self.per_word()).map(shared).collect();
            text += &format!(
                "acc{k} = fma(acc{k}, {columns}(shrink{k}), {columns}({}));
total{k} = fma(total{k}, shrink{k}, {});
",
                all.join(", "),
                shared(self.per_word())
            );
        }
        text
    }

    /// The weighted values of piece `p` of a thread, and the sum of their weights.
    fn piece(self, p: usize, pieces: usize) -> String {
        let (sets, columns) = (self.items().1, self.columns());
        let tokens = self.tokens() / PIECES;
        let quads_of_value = self.words() / 4;
        let mut text = String::new();
        for k in 0..sets {
            text += &format!("var piece{p}_{k} = {columns}(0.0);\nvar share{p}_{k} = 0.0;\n");
        }
        text += &format!("{{ let first = piece_of_thread * {}u + {}u;\n", pieces * tokens, p * tokens);
        for q in 0..tokens / 4 {
            let quad = format!("first / 4u + {q}u");
            if self.int8 {
                text += &format!("let scale{q} = of_values[{quad}];\n");
            }
            for k in 0..sets {
                text += &format!("let weight{q}_{k} = weights[head{k} * 16u + {quad}];\n");
                text += &format!(
                    "share{p}_{k} = share{p}_{k} + ((weight{q}_{k}.x + weight{q}_{k}.y) + (weight{q}_{k}.z + weight{q}_{k}.w));\n"
                );
            }
            for (t, c) in ["x", "y", "z", "w"].into_iter().enumerate() {
                let word =
                    format!("pool[(first + {}u) * {quads_of_value}u + word / 4u][word % 4u]", 4 * q + t);
                let value = match self.int8 {
                    true => format!("vec4<f32>(unpack4xI8({word}))"),
                    false => format!("unpack2x16float({word})"),
                };
                text += &format!("{{ let value = {value};\n");
                let scale = if self.int8 { format!(" * scale{q}.{c}") } else { String::new() };
                for k in 0..sets {
                    text += &format!(
                        "piece{p}_{k} = fma({columns}(weight{q}_{k}.{c}{scale}), value, piece{p}_{k});\n"
                    );
                }
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
