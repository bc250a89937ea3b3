//! Scores of tokens, and the tokens' weights.

use super::{AttendMany, LANES, THREADS, unpack};

impl AttendMany {
    /// Computes a thread's share of the scores, into `pool`.
    pub(super) fn score(self) -> String {
        let scored = self.scored();
        let each_token = |line: &dyn Fn(usize) -> String| (0..scored).map(line).collect::<String>();
        let mut text = each_token(&|t| self.each(|h| format!("var score{t}_{h} = 0.0;\n")));
        for i in 0..self.units_of_thread() {
            text += "{\n";
            text += &each_token(&|t| {
                let [low, high] = unpack(self.int8, &format!("key{t}_{i}"));
                format!("let low{t} = {low};\nlet high{t} = {high};\n")
            });
            text += &self.each(|h| {
                let at = format!("({}u + lane + {}u) * 2u", h * self.units, LANES * i);
                let mut text = format!("{{ let a = query[{at}];\nlet b = query[{at} + 1u];\n");
                for t in 0..scored {
                    for (half, of_query) in [("low", "a"), ("high", "b")] {
                        for c in ["x", "y", "z", "w"] {
                            let score = format!("score{t}_{h}");
                            text += &format!("{score} = fma({half}{t}.{c}, {of_query}.{c}, {score});\n");
                        }
                    }
                }
                text + "}\n"
            });
            text += "}\n";
        }
        text + &each_token(&|t| {
            let scale = if self.int8 { format!(" * key_scale{t}") } else { String::new() };
            self.each(|h| {
                let first = h * self.tokens() + t * THREADS / LANES;
                format!(
                    "{{ let at = lane * LANE + {first}u + thread / {LANES}u;
pool[at / 4u][at % 4u] = bitcast<u32>(score{t}_{h}{scale}); }}
"
                )
            })
        })
    }

    /// Statements for each score that a thread adds up: `j`, its head and its token.
    fn each_sum(self, line: impl Fn(usize) -> String) -> String {
        let all = self.heads * self.tokens();
        let one = |j: usize| {
            let guard = if all < THREADS { format!("if (thread < {all}u) ") } else { String::new() };
            format!(
                "{guard}{{ let head = (thread + {first}u) / TOKENS;
let token = (thread + {first}u) % TOKENS;
{} }}
",
                line(j),
                first = j * THREADS
            )
        };
        (0..self.sums()).map(one).collect()
    }

    /// Adds the lanes' shares of scores.
    pub(super) fn sum(self) -> String {
        self.each_sum(|_| {
            let share =
                |l: usize| format!("bitcast<f32>(pool[({l}u * LANE + at) / 4u][({l}u * LANE + at) % 4u])");
            let [a, b, c, d] = [0, 2, 4, 6].map(|l| format!("({} + {})", share(l), share(l + 1)));
            format!(
                "let at = head * TOKENS + token;
var sum = ({a} + {b}) + ({c} + {d});
if (args.cap > 0.0) {{ sum = capped(sum); }}
let is_seen = base + token >= start && base + token < end;
scores[head * 16u + token / 4u][token % 4u] = select(NONE, sum, is_seen);"
            )
        })
    }

    /// Computes the new maxima and the tokens' weights.
    pub(super) fn weight(self) -> String {
        let quads = self.tokens() / 4;
        self.each_sum(|j| {
            let all = (1..quads).fold("scores[head * 16u]".to_owned(), |all, q| {
                format!("max({all}, scores[head * 16u + {q}u])")
            });
            format!(
                "let four = {all};
best{j} = max(best{j}, max(max(four.x, four.y), max(four.z, four.w)));
let score = scores[head * 16u + token / 4u][token % 4u];
weights[head * 16u + token / 4u][token % 4u] = select(0.0, exp(score - best{j}), score > NONE);
if (token == 0u) {{ tops[head] = best{j}; }}"
            )
        })
    }
}
