#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;
use thunder_compute::RowEdits;
use thunder_model::tokenizer::Tokenizer;

use super::*;
use crate::sampling::Sampling;

fn info() -> ModelInfo {
    let tokenizer = Arc::new(Tokenizer::load(&thunder_testing::builtin_model()).unwrap());
    ModelInfo {
        name: "builtin".into(),
        context_length: 2048,
        vocab_size: 4096,
        chat_template: None,
        default_sampling: Sampling::default(),
        eos: vec![tokenizer.token_id("<|im_end|>").unwrap()],
        tokenizer,
        pooling: Default::default(),
        kind: Default::default(),
        token_types: 1,
        digest: "5e".repeat(32),
        files: Default::default(),
        adapters: Vec::new(),
        ranks: 1,
    }
}

/// Excludes the tokens that may not follow.
fn apply(masked: &mut MaskedAnswer, logits: &mut [f32]) -> Option<()> {
    let mut edits = RowEdits::default();
    masked.allow(&mut edits.allowed)?;
    edits.apply(logits);
    Some(())
}

/// An answer from random logits: only the grammar gives it a form.
fn answer(constraint: &Constraint, info: &ModelInfo, mut seed: u64, most: usize) -> Result<String, String> {
    let mut masked = MaskedAnswer::begin(constraint.clone());
    let mut ids = Vec::new();
    while ids.len() < most {
        let mut logits: Vec<f32> = (0..info.vocab_size)
            .map(|_| {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (seed >> 40) as f32 / 1e5
            })
            .collect();
        // Makes strings end at some point.
        for end in ["\"", "\"}", "}", "]"] {
            if let Some(id) = info.tokenizer.token_id(end) {
                logits[id as usize] += 100.0;
            }
        }
        apply(&mut masked, &mut logits).ok_or_else(|| masked.failure().unwrap().message.clone())?;
        let id = thunder_compute::choice::argmax(&logits).0;
        if masked.accept(id) {
            return Ok(info.tokenizer.decode(&ids, false));
        }
        ids.push(id);
    }
    Err(format!("no end after {most} tokens: {}", info.tokenizer.decode(&ids, false)))
}

#[test]
fn answers_follow_their_schema_whatever_the_model_wants() {
    let info = info();
    let compiler = Compiler::new(&info).unwrap();
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["city", "days", "tags"],
        "properties": {
            "city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "tags": {"type": "array", "items": {"enum": ["wet", "dry"]}, "maxItems": 3},
        },
    });
    let constraint = compiler.compile(&Grammar::JsonSchema(schema)).unwrap();
    for seed in 0..20 {
        let text = answer(&constraint, &info, seed, 400).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        assert!(value["city"].as_str().unwrap().chars().count() <= 12, "{text}");
        assert!((1..=7).contains(&value["days"].as_i64().unwrap()), "{text}");
        assert!(value["tags"].as_array().unwrap().iter().all(|tag| tag == "wet" || tag == "dry"), "{text}");
        assert_eq!(value.as_object().unwrap().len(), 3, "{text}");
    }
}

#[test]
fn regular_expressions_and_grammars_hold_too() {
    let info = info();
    let compiler = Compiler::new(&info).unwrap();
    let regex = compiler.compile(&Grammar::Regex("[0-9]{3}-(yes|no)".into())).unwrap();
    let lark = compiler.compile(&Grammar::Lark("start: \"a\" (\"b\" | \"c\") \"!\"".into())).unwrap();
    for seed in 0..10 {
        let text = answer(&regex, &info, seed, 100).unwrap();
        let (digits, word) = text.split_once('-').unwrap();
        assert!(digits.len() == 3 && digits.bytes().all(|byte| byte.is_ascii_digit()), "{text}");
        assert!(["yes", "no"].contains(&word), "{text}");
        assert!(["ab!", "ac!"].contains(&answer(&lark, &info, seed, 100).unwrap().as_str()));
    }
}

#[test]
fn bad_and_hostile_grammars_are_errors_in_bounded_time() {
    let info = info();
    let compiler = Compiler::new(&info).unwrap();
    let began = std::time::Instant::now();
    let nested =
        |depth: usize| (0..depth).fold(json!({"type": "string"}), |inner, _| json!({"items": inner}));
    let hostile = [
        Grammar::Regex("(".into()),
        Grammar::Regex("(((a{1000}){1000}){1000}){1000}".into()),
        Grammar::Lark("start: nothing".into()),
        Grammar::Lark("start: \"a\" start".into()),
        Grammar::JsonSchema(json!({"type": "colour"})),
        Grammar::JsonSchema(json!({"$ref": "https://example.com/schema.json"})),
        Grammar::JsonSchema(json!({"type": "string", "pattern": "(a|aa|aaa){500}{500}$"})),
        Grammar::JsonSchema(json!(false)),
        Grammar::Lark(format!("start: \"{}\"", "x".repeat(MAX_GRAMMAR_BYTES))),
        Grammar::JsonSchema(nested(100)),
    ];
    for (index, grammar) in hostile.iter().enumerate() {
        // Some are refused and some are slow, but none may hang or panic.
        let compiled = compiler.compile(grammar);
        match (index, compiled) {
            (0 | 2 | 4 | 5 | 7 | 8, Ok(_)) => panic!("grammar {index} was accepted"),
            (_, Ok(constraint)) => drop(answer(&constraint, &info, 1, 8)),
            (_, Err(error)) => assert!(!error.to_string().is_empty() && error.to_string().len() <= 600),
        }
        assert!(began.elapsed().as_secs() < 60, "grammar {index} takes too long");
    }
}

#[test]
fn what_is_wrong_with_a_grammar_is_said_in_plain_words() {
    let compiler = Compiler::new(&info()).unwrap();
    for (grammar, told) in [
        (Grammar::JsonSchema(json!({"$ref": "#"})), "needs itself"),
        (Grammar::Lark("start: x\nx: x".into()), "needs itself"),
    ] {
        let error = compiler.compile(&grammar).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains(told), "{grammar:?}: {error}");
    }
}

/// Either llguidance's limits or the masks' time limit apply; both are the request's fault.
#[test]
fn a_hostile_grammar_fails_by_its_own_fault_if_it_does() {
    let info = info();
    let compiler = Compiler::new(&info).unwrap();
    let bomb = compiler.compile(&Grammar::Regex("((a{0,500}){0,500}){0,500}".into())).unwrap();
    let mut masked = MaskedAnswer::begin(bomb);
    for _ in 0..200 {
        let mut logits = vec![0.0; info.vocab_size];
        // The answer could end here.
        logits[info.eos[0] as usize] = -1.0;
        if apply(&mut masked, &mut logits).is_none() {
            let failure = masked.failure().unwrap();
            assert_eq!(failure.fault, crate::event::Fault::Request, "{failure:?}");
            assert!(!failure.message.contains("too many expressions"), "{failure:?}");
            return;
        }
        if masked.accept(thunder_compute::choice::argmax(&logits).0) {
            return;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_grammar_panics(text in "[a-z(){}|*+\\[\\]\"/:$%<> \n]{0,60}") {
        thread_local! {
            static COMPILER: Compiler = Compiler::new(&info()).unwrap();
        }
        COMPILER.with(|compiler| {
            let _ = compiler.compile(&Grammar::Regex(text.clone()));
            let _ = compiler.compile(&Grammar::Lark(format!("start: {text}")));
        });
    }
}
