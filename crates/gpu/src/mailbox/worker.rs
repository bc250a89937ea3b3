//! The host's side of exchanges: a thread that takes the device's partial sums, sums them over the
//! ranks and answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use thunder_collectives::{CommError, Group, Op, Stats};
use thunder_compute::cpu::pool::pin;

use super::boxes::{Boxes, Poison, slot_of};
use super::numbers::Numbers;
use crate::device::ANSWER_LIMIT_S;
use crate::device::gate::Gates;
use crate::wait::{Cores, Waits};

/// Time between checks of the peers while the device computes.
const CHECK: Duration = Duration::from_millis(1);

/// Opens all gates. Drivers allow a semaphore to be 2^31 - 1 ahead of the awaited value.
const ALL_GATES: u64 = (1 << 31) - 1;

/// What sums.
pub(crate) enum Summer {
    Group(Box<Group>),
    /// A stand-in for proofs, which gets the exchange's number.
    Stand(fn(&mut [f32], u32)),
}

impl Summer {
    fn sum(&mut self, values: &mut [f32], number: u32) -> Result<(), CommError> {
        match self {
            Self::Group(group) => group.all_reduce(values, Op::Sum),
            Self::Stand(sum) => {
                sum(values, number);
                Ok(())
            }
        }
    }

    fn check(&mut self) -> Result<(), CommError> {
        match self {
            Self::Group(group) => group.check(),
            Self::Stand(_) => Ok(()),
        }
    }
}

/// A recorded exchange: rows of `width` numbers, `stride` words apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Exchange {
    pub number: u32,
    /// The gate that the answer opens, if there are gates.
    pub gate: u64,
    pub rows: usize,
    pub width: usize,
    pub stride: usize,
}

impl Exchange {
    fn words(self) -> usize {
        self.rows * self.stride
    }

    fn slot(self) -> usize {
        slot_of(self.number)
    }
}

/// Why exchanges ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The ranks could not sum.
    Comm(CommError),
    /// The device gave up.
    Poison(u32, Poison),
    /// The device stored no partial sums, or its commands could not be submitted.
    Silent(u32),
}

pub(super) enum Order {
    /// Serve exchanges with this summer until [`Order::Return`].
    Begin(Summer),
    Exchange(Exchange),
    Return,
}

/// A returned summer, and the first failure while the worker had it.
type Returned = (Summer, Result<(), Failure>);

/// What the group's sums have cost: operations, bytes and nanoseconds.
#[derive(Default)]
struct Costs([AtomicU64; 3]);

impl Costs {
    fn add(&self, Stats { operations, bytes, time }: Stats) {
        for (sum, cost) in self.0.iter().zip([operations, bytes, time.as_nanos() as u64]) {
            sum.fetch_add(cost, Ordering::Relaxed);
        }
    }

    fn take(&self) -> Stats {
        let [operations, bytes, ns] = [0, 1, 2].map(|at: usize| self.0[at].swap(0, Ordering::Relaxed));
        Stats { operations, bytes, time: Duration::from_nanos(ns) }
    }
}

/// The thread, as other threads see it.
pub(super) struct Worker {
    numbers: Arc<Numbers>,
    returned: Receiver<Returned>,
    /// Tells the thread to stop waiting for the device.
    ended: Arc<AtomicBool>,
    costs: Arc<Costs>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// `is_real`: the device does not compute on the host's cores. `cores`: those of the rank.
    pub fn start(
        boxes: Arc<Boxes>,
        gates: Option<Gates>,
        (is_real, cores): (bool, Option<Cores>),
    ) -> std::io::Result<Self> {
        let (orders, incoming) = channel();
        let (outgoing, returned) = channel();
        let (ended, costs) = (Arc::new(AtomicBool::new(false)), Arc::<Costs>::default());
        let serving = Serving {
            boxes,
            gates,
            ended: Arc::clone(&ended),
            costs: Arc::clone(&costs),
            waits: Waits::new(is_real),
            answered: 0,
            words: Vec::new(),
            values: Vec::new(),
        };
        let thread = std::thread::Builder::new().name("gpu-sums".to_owned());
        let thread = thread.spawn(move || {
            cores.and_then(|cores| cores.of_thread(0)).into_iter().for_each(pin);
            serving.run(&incoming, &outgoing);
        })?;
        Ok(Self { numbers: Arc::new(Numbers::new(orders)), returned, ended, costs, thread: Some(thread) })
    }

    /// What the group's sums have cost since the last call.
    pub fn take_stats(&self) -> Stats {
        self.costs.take()
    }

    /// Numbers exchanges, which the thread then serves.
    pub fn numbers(&self) -> &Arc<Numbers> {
        &self.numbers
    }

    fn order(&self, order: Order) {
        assert!(self.numbers.order(order), "the thread that serves exchanges has ended: it panicked");
    }

    pub fn begin(&self, summer: Summer) {
        self.order(Order::Begin(summer));
    }

    /// Waits for all exchanges, whose commands were submitted. `is_alive` is called now and then to
    /// ask whether the device still works.
    pub fn take_back(&self, is_alive: impl Fn() -> bool) -> Returned {
        self.order(Order::Return);
        loop {
            if !is_alive() {
                self.ended.store(true, Ordering::Relaxed);
            }
            match self.returned.recv_timeout(Duration::from_millis(100)) {
                Ok(returned) => return returned,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("the thread that serves exchanges has ended: it panicked")
                }
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        self.numbers.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The thread's own state.
struct Serving {
    boxes: Arc<Boxes>,
    gates: Option<Gates>,
    ended: Arc<AtomicBool>,
    costs: Arc<Costs>,
    waits: Waits,
    /// Words of the previous answer.
    answered: usize,
    words: Vec<u32>,
    values: Vec<f32>,
}

impl Serving {
    fn run(mut self, orders: &Receiver<Order>, returned: &Sender<Returned>) {
        let mut serving: Option<Returned> = None;
        while let Some(order) = self.waits.next(orders) {
            match order {
                Order::Begin(summer) => serving = Some((summer, Ok(()))),
                Order::Exchange(exchange) => {
                    let Some((summer, outcome)) = &mut serving else { continue };
                    if outcome.is_ok() {
                        *outcome = self.serve(exchange, summer);
                        if outcome.is_err() {
                            self.end();
                        }
                    }
                }
                Order::Return => {
                    let Some(done) = serving.take() else { return };
                    if returned.send(done).is_err() {
                        return;
                    }
                }
            }
        }
        self.end();
    }

    /// Tells the device that nobody will answer further exchanges.
    fn end(&self) {
        self.boxes.end();
        self.open(ALL_GATES);
    }

    fn open(&self, gate: u64) {
        if let Some(gates) = &self.gates {
            gates.open(gate);
        }
    }

    fn serve(&mut self, exchange: Exchange, summer: &mut Summer) -> Result<(), Failure> {
        let (number, count, slot) = (exchange.number, exchange.words(), exchange.slot());
        self.words.resize(count, 0);
        self.receive(exchange, summer)?;
        self.values.clear();
        for row in self.words.chunks_exact(exchange.stride) {
            self.values.extend(row[..exchange.width].iter().map(|word| f32::from_bits(*word)));
        }
        summer.sum(&mut self.values, number).map_err(Failure::Comm)?;
        if let Summer::Group(group) = summer {
            self.costs.add(group.reset_stats());
        }
        let rows = self.words.chunks_exact_mut(exchange.stride);
        for (row, values) in rows.zip(self.values.chunks_exact(exchange.width)) {
            let (numbers, padding) = row.split_at_mut(exchange.width);
            numbers.iter_mut().zip(values).for_each(|(word, value)| *word = value.to_bits());
            padding.fill(0);
        }
        self.boxes.answer(slot, &self.words, number);
        self.open(exchange.gate);
        self.boxes.empty(slot, [count, std::mem::replace(&mut self.answered, count)]);
        Ok(())
    }

    /// Waits for the device's partial sums.
    fn receive(&mut self, exchange: Exchange, summer: &mut Summer) -> Result<(), Failure> {
        let (mut present, mut wait, mut checked) = (0, self.waits.begin(), Duration::ZERO);
        loop {
            present = self.boxes.take(exchange.slot(), present, &mut self.words);
            if present == self.words.len() {
                return Ok(());
            }
            let Some(waited) = wait.pause() else { continue };
            if let Some((number, poison)) = self.boxes.verdict() {
                return Err(Failure::Poison(number, poison));
            }
            if waited > Duration::from_secs(ANSWER_LIMIT_S) || self.ended.load(Ordering::Relaxed) {
                return Err(Failure::Silent(exchange.number));
            }
            if waited - checked > CHECK {
                summer.check().map_err(Failure::Comm)?;
                checked = waited;
            }
        }
    }
}
