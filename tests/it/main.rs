//! All integration tests, as one binary.

#![allow(clippy::mem_forget, reason = "a process that dies gives nothing back")]
#![allow(clippy::print_stdout, reason = "figures, seen with --nocapture")]
#![allow(clippy::async_yields_async, reason = "a task is made now and awaited later")]

#[cfg(feature = "redis")]
mod adapt_script;
mod adaptive;
#[cfg(feature = "redis")]
mod adaptive_faults;
#[cfg(all(feature = "admin", feature = "metrics", feature = "redis"))]
mod adaptive_shown;
#[cfg(all(feature = "admin", feature = "redis"))]
mod admin;
#[cfg(all(feature = "admin", feature = "redis"))]
mod admin_access;
#[cfg(all(feature = "admin", feature = "redis"))]
mod admin_browser;
mod auto_traits;
mod budget;
mod budgets;
mod cached_limits;
mod cancellation;
#[cfg(feature = "redis")]
mod chaos;
#[cfg(all(feature = "axum", feature = "redis"))]
mod clients;
mod conformance;
mod conformance_fair;
mod conformance_limits;
#[cfg(feature = "axum")]
mod connect_info;
#[cfg(feature = "redis")]
mod crowded_rates;
#[cfg(all(feature = "metrics", feature = "redis"))]
mod dashboard;
#[cfg(feature = "redis")]
mod deploy;
#[cfg(feature = "redis")]
mod detours;
mod diagnostics;
#[cfg(feature = "redis")]
mod differential;
#[cfg(feature = "etcd")]
mod etcd;
#[cfg(feature = "etcd")]
mod etcd_faults;
#[cfg(feature = "etcd")]
mod etcd_wire;
#[cfg(all(feature = "etcd", feature = "tls"))]
mod etcd_wire_tls;
mod expected_wait;
mod fair;
mod fair_shares;
#[cfg(feature = "redis")]
mod fleet;
#[cfg(all(feature = "admin", feature = "redis"))]
mod fleet_admin;
#[cfg(feature = "redis")]
mod fleet_cluster;
#[cfg(feature = "redis")]
mod fleet_config;
#[cfg(feature = "redis")]
mod fleet_fair;
#[cfg(feature = "redis")]
mod fleet_operate;
#[cfg(feature = "redis")]
mod fleet_outage;
#[cfg(feature = "redis")]
mod fleet_sentinel;
#[cfg(feature = "tls")]
mod fleet_tls;
mod further;
#[cfg(feature = "redis")]
mod gateway;
#[cfg(feature = "redis")]
mod grpc;
#[cfg(all(feature = "axum", feature = "redis"))]
mod http;
#[cfg(all(feature = "axum", feature = "redis"))]
mod keys;
mod layer;
#[cfg(all(feature = "axum", feature = "redis"))]
mod left;
mod linger;
mod long_names;
#[cfg(feature = "redis")]
mod lua;
mod manual;
#[cfg(feature = "metrics")]
mod metrics;
mod operate;
#[cfg(feature = "redis")]
mod outage;
#[cfg(feature = "redis")]
mod outage_policies;
#[cfg(feature = "redis")]
mod outage_rates;
mod pause_records;
mod pauses;
mod properties;
mod rates;
mod records;
#[cfg(feature = "redis")]
mod redis_errors;
#[cfg(feature = "redis")]
mod redis_shapes;
#[cfg(feature = "axum")]
mod refusals;
mod reuse;
mod runtimes;
#[cfg(feature = "redis")]
mod secrets;
mod sequences;
mod service;
#[cfg(feature = "redis")]
mod shadow;
#[cfg(feature = "redis")]
mod stacked;
#[cfg(all(feature = "axum", feature = "redis"))]
mod stacks;
#[cfg(all(feature = "axum", feature = "redis"))]
mod streams;
mod support;
#[cfg(feature = "redis")]
mod suspension;
mod tenants_budgets;
#[cfg(feature = "tls")]
mod tls;
mod traces;
#[cfg(all(feature = "axum", feature = "redis"))]
mod upgraded;
mod your_service;
