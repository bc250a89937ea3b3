//! An answer that one engine has begun continues in another, and no bit of it changes.

use crate::common::{LAYOUTS, PATIENCE, with_engine};
use thunder_engine::{AnsweredToken, Engine, Event, FinishReason, Limits, Request, STEP_TIME, Sampling};

const MAX_TOKENS: usize = 40;
const LIMITS: Limits = Limits {
    sequences: 4,
    rows: 8,
    kv_blocks: 32,
    whole_prompts: None,
    prefix_cache: true,
    snapshots: None,
    draft_rows: 8,
    ahead: false,
    draft_states: false,
    step_time: STEP_TIME,
    routed: None,
};

fn request(engine: &Engine, index: usize) -> Request {
    let prompt = format!("Question {index}: what does rank {} do, and why?", index * 7);
    Request {
        prompt: engine.info().tokenizer.encode(&prompt, false).unwrap(),
        // One is greedy, one sampled, one sampled with penalties.
        sampling: Sampling {
            temperature: index.min(1) as f32,
            seed: Some(index as u64),
            repetition_penalty: if index == 2 { 1.2 } else { 1.0 },
            presence_penalty: if index == 2 { 0.5 } else { 0.0 },
            ..Sampling::default()
        },
        max_tokens: Some(MAX_TOKENS),
        ignore_eos: true,
        // With logits, so that a difference in any bit is visible.
        logprobs: (index > 0).then_some(2),
        reports_tokens: true,
        ..Request::default()
    }
}

/// An answer's text, its tokens with their reports, the reason of its end, and its number of
/// tokens.
type Answer = (String, Vec<AnsweredToken>, FinishReason, usize);

fn answer(engine: &Engine, request: Request) -> Answer {
    let mut stream = engine.submit(request).unwrap();
    let (mut answer, mut all) = (String::new(), Vec::new());
    loop {
        match stream.next_within(PATIENCE).expect("an event comes in time").unwrap() {
            Event::Delta { text, .. } => answer.push_str(&text),
            Event::Accepted { tokens } => all.extend(tokens),
            Event::Mark { .. } => {}
            Event::Done { reason, usage } => return (answer, all, reason, usage.completion_tokens),
            Event::Failed { message, .. } => panic!("{message}"),
            other => panic!("{other:?} was not asked for"),
        }
    }
}

#[test]
fn an_answer_goes_on_elsewhere_with_the_same_bits() {
    for (ranks, parallel) in LAYOUTS {
        let mut whole = Vec::new();
        with_engine(ranks, parallel, LIMITS, |engine| {
            whole = (0..3).map(|index| answer(&engine, request(&engine, index))).collect();
        });
        // Another engine, whose cache contains nothing of it.
        with_engine(ranks, parallel, LIMITS, |engine| {
            for (index, whole) in whole.iter().enumerate() {
                let tokens = &whole.1;
                assert!(tokens.len() > MAX_TOKENS - 4, "{} tokens were reported", tokens.len());
                assert_eq!(tokens[0].report.is_some(), index > 0);
                for cut in [1, 2, 17, tokens.len() - 1, tokens.len()] {
                    let request = Request { answered: tokens[..cut].to_vec(), ..request(&engine, index) };
                    let resumed = answer(&engine, request);
                    assert_eq!(resumed, *whole, "{ranks} ranks, {parallel:?}, {index}, after {cut}");
                }
            }
        });
    }
}

#[test]
fn an_answer_that_was_complete_ends_at_once_and_a_longer_one_is_refused() {
    with_engine(1, thunder_model::Parallelism::Tensor, LIMITS, |engine| {
        let whole = answer(&engine, request(&engine, 0));
        let stop: String = whole.0.chars().skip(30).take(5).collect();
        let stopped = Request { stop: vec![stop], ..request(&engine, 0) };
        let expected = answer(&engine, stopped.clone());
        let resumed = answer(&engine, Request { answered: whole.1.clone(), ..stopped });
        assert_eq!((&resumed.0, resumed.2), (&expected.0, FinishReason::StopText(0)));
        let context = engine.info().context_length;
        let answered = vec![whole.1[0].clone(); context];
        let refused = engine.submit(Request { answered, ..request(&engine, 0) }).unwrap_err();
        assert!(refused.to_string().contains("context"), "{refused}");
        let strange = AnsweredToken { id: u32::MAX, report: None };
        let refused = engine.submit(Request { answered: vec![strange], ..request(&engine, 0) }).unwrap_err();
        assert!(refused.to_string().contains("4294967295"), "{refused}");
    });
}
