// What /admin/cluster and /admin/models say, as the command line prints with --json.

export interface NodeReport {
  version: string;
  system: string;
  cores: number;
  memory_total: number;
  memory_free: number;
  api: string | null;
  memory_bytes_s?: number;
  temperature_c?: number;
}

export interface Member {
  id: string;
  short: string;
  name: string;
  up: boolean;
  cut_off_from: string[];
  drained: boolean;
  addresses: string[];
  report: NodeReport | null;
}

export interface Rank {
  node: string;
  state: "Starting" | "Ready" | { Ended: string } | null;
  /** How it is, for people: as `thunder model status --detail` says it. */
  words: string;
}

export interface Link {
  from: string;
  to: string;
  latency_us?: number;
  bytes_s?: number;
  kind?: string;
}

export interface Cluster {
  /** False for a single `thunder serve`. */
  cluster: boolean;
  me: string;
  code: string | null;
  removed: boolean;
  disk_error: string | null;
  members: Member[];
  newcomers: { short: string; name: string; addresses: string[] }[];
  models: { name: string; ready: boolean; generation: number; ranks: Rank[] }[];
  links?: Link[];
  /** What is wrong, in words. */
  problems?: string[];
  /** Jobs with models on nodes' disks. */
  tasks?: Task[];
}

/** A job with a model on some nodes. */
export interface Task {
  id: number;
  work: "pull" | "update" | "verify";
  model: string;
  nodes: { node: string; state: "waiting" | "running" | { done: string } | { failed: string }; done: number; total: number }[];
}

/** What a model's engine counts. */
export interface Load {
  ranks: number;
  context: number;
  running: number;
  waiting: number;
  kv_tokens: number;
  kv_tokens_used: number;
  prompt_tokens: number;
  generated_tokens: number;
  reduce_share: number | null;
  shards?: { node: string; weight_bytes: number; kv_bytes: number }[];
}

export interface ServedModel {
  name: string;
  ready: boolean;
  generation: number;
  ranks: Rank[];
  load: Load | null;
}

export interface ModelList {
  /** Whether models can be loaded and unloaded here; else why not. */
  cannot_change: string | null;
  models: ServedModel[];
}
